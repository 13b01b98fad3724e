"""PipeDream-2BW against its definition: one process that keeps two versions of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import PipelineError
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from tests.support.parity import whole
from tests.support.pipeline_training import PipelineCase, batch_of, build, compiled, loss_of, microbatches_of
from tests.support.ranks import Ranks

STEPS, MAX_NORM = 4, 0.5
NAME = "pipedream_2bw"
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, eps=1e-4),
}
CASES = [
    (PipelineCase("llama", "pp2", NAME), "sgd"),
    (PipelineCase("llama", "pp4", NAME), "adamw"),
    (PipelineCase("gpt2", "pp2", NAME, options={"recompute": "full"}), "adamw"),  # whose embedding is tied
    (PipelineCase("llama", "pp2xdp2", NAME, options={"strategy": "zero3"}), "sgd"),
    (PipelineCase("gpt2", "pp2xdp2", NAME, options={"strategy": "zero1"}), "adamw"),
    (PipelineCase("llama", "pp2xtp2", NAME, options={"strategy": "megatron"}), "sgd"),
]


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss of every step, the gradients of the last, and the parameters after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def _parallel(case: PipelineCase, optimizer: str) -> Trained:
    model = compiled(case)
    updates, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(STEPS):
        updates.zero_grad()
        args, kwargs = batch_of(microbatches_of(case, step))
        losses.append(float(model.train_step(*args, **kwargs)))
        model.clip_grad_norm_(MAX_NORM)
        updates.step()
    named = dict(model.named_parameters())
    gradients = {name: whole(p.grad) for name, p in named.items()}
    return Trained(losses, gradients, {name: whole(p) for name, p in named.items()})  # type: ignore[arg-type]


def _by_definition(case: PipelineCase, optimizer: str, delay: int = 1) -> Trained:
    """Train by W(t+1) = W(t) - ν ∇f(W(t-1)), with W(-1) = W(0); without a delay by ∇f(W(t))."""
    model = build(case)
    named = dict(model.named_parameters())
    updates, losses = OPTIMIZERS[optimizer](named.values()), []
    versions: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        versions.append({name: weight.detach().clone().requires_grad_() for name, weight in named.items()})
        used, total = versions[max(0, step - delay)], 0.0
        for weight in used.values():
            weight.grad = None
        for args, kwargs in microbatches_of(case, step):
            loss = loss_of(case, torch.func.functional_call(model, used, args, kwargs)) / case.microbatches
            loss.backward()
            total += loss.item()
        for name, weight in named.items():
            gradient = used[name].grad
            weight.grad = None if gradient is None else gradient.clone()
        torch.nn.utils.clip_grad_norm_(named.values(), MAX_NORM)
        updates.step()
        losses.append(total)
    gradients = {name: weight.grad for name, weight in named.items() if weight.grad is not None}
    return Trained(losses, gradients, {name: weight.detach() for name, weight in named.items()})


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:zero1", "ignore:megatron")
@pytest.mark.parametrize(
    ("case", "optimizer"),
    CASES,
    ids=[f"{case.family}-{case.mesh}-{optimizer}-{'-'.join(case.options.values())}" for case, optimizer in CASES],
)
def test_a_step_updates_the_newest_weights_by_gradients_of_those_before(
    ranks: Ranks, case: PipelineCase, optimizer: str
) -> None:
    found = ranks.run(_parallel, case, optimizer, world_size=case.world_size, timeout=180)
    expected = _by_definition(case, optimizer)
    for rank in found:
        torch.testing.assert_close(rank.losses, expected.losses, rtol=1e-4, atol=1e-5)
        for name, gradient in rank.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-5)
        for name, parameter in rank.parameters.items():
            torch.testing.assert_close(parameter, expected.parameters[name], rtol=1e-4, atol=2e-5)
    assert set().union(*(rank.parameters for rank in found)) == set(expected.parameters)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_definition_differs_from_updates_without_a_delay(optimizer: str) -> None:
    case = PipelineCase("llama", "pp2", NAME)
    late, plain = (_by_definition(case, optimizer, delay) for delay in (1, 0))
    apart = [float((late.parameters[n] - plain.parameters[n]).abs().max()) for n in plain.parameters]
    assert max(apart) > 1e-3  # more than the other tests allow
    assert late.losses[:1] == plain.losses[:1] and late.losses[1] == pytest.approx(_first_again(case), rel=1e-5)


def _first_again(case: PipelineCase) -> float:
    """The loss of the second batch on the weights of the first."""
    model = build(case)
    losses = [loss_of(case, model(*args, **kwargs)).item() for args, kwargs in microbatches_of(case, 1)]
    return sum(losses) / case.microbatches


def _around_a_step() -> tuple[bool, bool, bool, list[float]]:
    """Return whether newest weights are in place behind a step, also one that fails, and losses around a checkpoint."""
    case = PipelineCase("mlp", "pp2", NAME)
    model = compiled(case)
    assert isinstance(model, PipelineModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [batch_of(microbatches_of(case, step))[0] for step in range(3)]

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = float(model.train_step(*batches[number]))
        optimizer.step()
        return loss

    step(0)
    newest = {name: whole(p).clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.train_step(*batches[1])
    in_place = all(torch.equal(whole(p), newest[name]) for name, p in model.named_parameters())  # type: ignore[arg-type]
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    older = float(model.train_step(*batches[2]))  # no update since: the older weights are the newest
    step(2)
    with pytest.raises(ValueError, match="by intent"), model._older_weights.in_place(model):
        raise ValueError("by intent")
    after = {name: whole(p).clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    changed = any(not torch.equal(after[name], each) for name, each in newest.items())
    model.load_state_dict(saved)
    forgotten = not model._older_weights._values
    return in_place, changed, forgotten, [older, float(model.train_step(*batches[2]))]


def test_newest_weights_are_in_place_between_steps_and_loaded_ones_have_no_older(ranks: Ranks) -> None:
    for in_place, changed, forgotten, (before, loaded) in ranks.run(_around_a_step):
        assert in_place and changed and forgotten
        assert before == pytest.approx(loaded, rel=1e-6)


def _memory(schedule: str) -> tuple[dict[str, int], int, int]:
    """The parts of a stage's plan, and bytes of its parameters and of the older ones after a step."""
    case = PipelineCase("llama", "pp2xdp2", schedule, options={"strategy": "zero3"})
    model = compiled(case)
    assert isinstance(model, PipelineModule)
    args, kwargs = batch_of(microbatches_of(case, 0))
    model.train_step(*args, **kwargs)
    parts: dict[str, int] = dict.fromkeys(("parameters", "older weights"), 0)
    for number in model._ready().executables:
        memory = model.plan.stages[number].plan.memory
        assert memory is not None
        parts = {name: count + memory.parts.get(name, 0) for name, count in parts.items()}
    stored = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[operator]
    return parts, stored, sum(each.nbytes for each in model._older_weights._values.values())


@pytest.mark.slow
def test_the_second_version_is_counted_as_it_is_stored(ranks: Ranks) -> None:
    for parts, stored, older in ranks.run(_memory, NAME, world_size=4, timeout=120):
        assert parts["older weights"] == parts["parameters"] == stored == older
    for parts, _, older in ranks.run(_memory, "1f1b", world_size=4, timeout=120):
        assert parts["older weights"] == older == 0


def test_its_order_is_that_of_1f1b() -> None:
    assert Schedule(NAME, 4, 8).orders == Schedule("1f1b", 4, 8).orders


@pytest.mark.parametrize(("given", "message"), [((4, 2), "at least as many micro-batches"), ((2, 4, 2), "one stage")])
def test_what_it_cannot_run_is_refused_by_name(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PipelineError, match=f'"{NAME}" .*{message}'):
        Schedule(NAME, *given)
