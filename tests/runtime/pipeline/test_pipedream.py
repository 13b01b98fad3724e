"""PipeDream against its definition: one process that keeps every version of every stage's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PipelineError
from tests.support.optimizing import losses_of
from tests.support.parity import whole
from tests.support.pipeline_training import PipelineCase, batch_of, build, compiled, loss_of, microbatches_of
from tests.support.ranks import Ranks, mesh

STEPS = 2
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
CASES = [
    (PipelineCase("llama", "pp2", "pipedream"), "sgd"),
    (PipelineCase("llama", "pp4", "pipedream"), "adamw"),
    (PipelineCase("llama", "pp2xdp2", "pipedream"), "adamw"),
    (PipelineCase("llama", "pp2xdp2", "pipedream", options={"strategy": "zero3"}), "sgd"),
    (PipelineCase("llama", "pp2xtp2", "pipedream"), "sgd"),
]

ONE = PipelineCase("llama", "pp2", "pipedream")
"""Case of a run with one micro-batch: only the first of its micro-batches is used, as the batch."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss of every step, and the parameters after the last."""

    losses: list[float]
    parameters: dict[str, Tensor]
    has_gradients: bool = False


def _parallel(case: PipelineCase, optimizer: str) -> Trained:
    model = compiled(case)
    model.optimizer = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for step in range(STEPS):
        args, kwargs = batch_of(microbatches_of(case, step))
        losses.append(float(model.train_step(*args, **kwargs)))
    left = any(p.grad is not None for p in model.parameters())
    return Trained(losses, {name: whole(p) for name, p in model.named_parameters()}, left)  # type: ignore[misc]


def _by_definition(case: PipelineCase, optimizer: str, stages: list[list[str]]) -> Trained:
    """Train with the weights of each forward by `planning.pipeline.schedules.schedule`; `stages` names parameters.

    The gradient of a micro-batch is that of the function its forward ran, at the weights it saw; each stage applies it
    to its newest weights.
    """
    model = build(case)
    newest = [{name: model.get_parameter(name) for name in names} for names in stages]
    optimizers = [OPTIMIZERS[optimizer](weights.values()) for weights in newest]
    losses = []
    for step in range(STEPS):
        versions = [[_copied(weights)] for weights in newest]
        total = 0.0
        for number, (args, kwargs) in enumerate(microbatches_of(case, step)):
            seen = [each[max(0, number + 1 - (len(stages) - rank))] for rank, each in enumerate(versions)]
            used = {name: weight for weights in seen for name, weight in weights.items()}
            loss = loss_of(case, torch.func.functional_call(model, used, args, kwargs))
            total += loss.item() / case.microbatches
            gradients = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
            for rank, weights in enumerate(newest):
                for name, weight in weights.items():
                    weight.grad = gradients[name]
                optimizers[rank].step()
                versions[rank].append(_copied(weights))
        losses.append(total)
    return Trained(losses, {name: p.detach() for name, p in model.named_parameters()})


def _copied(weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}


def _check(found: list[Trained], expected: Trained) -> None:
    for rank in found:
        torch.testing.assert_close(rank.losses, expected.losses, rtol=1e-4, atol=1e-5)
        for name, parameter in rank.parameters.items():
            torch.testing.assert_close(parameter, expected.parameters[name], rtol=1e-4, atol=1e-5)
        assert not rank.has_gradients
    assert set().union(*(rank.parameters for rank in found)) == set(expected.parameters)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "optimizer"),
    CASES,
    ids=[f"{case}-{optimizer}-{case.options.get('strategy')}" for case, optimizer in CASES],
)
def test_every_stage_runs_a_micro_batch_on_the_weights_of_its_forward(
    ranks: Ranks, case: PipelineCase, optimizer: str
) -> None:
    found = ranks.run(_parallel, case, optimizer, world_size=case.world_size, timeout=180)
    stages = list({tuple(rank.parameters): list(rank.parameters) for rank in found}.values())
    assert len(stages) == case.axes["pp"]
    _check(found, _by_definition(case, optimizer, stages))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_definition_differs_from_updates_without_a_delay(optimizer: str) -> None:
    case = PipelineCase("llama", "pp2", "pipedream")
    names = [name for name, _ in build(case).named_parameters()]
    late = _by_definition(case, optimizer, [names[:10], names[10:]])
    plain = _by_definition(case, optimizer, [names])
    apart = [float((late.parameters[name] - plain.parameters[name]).abs().max()) for name in names]
    assert max(apart) > 1e-3  # far more than the other tests allow


def _one_micro_batch() -> Trained:
    model = autopar.compile(
        build(ONE),
        mesh((2,), ("pp",)),
        microbatches_of(ONE, 0)[0][1],
        pipeline=autopar.Pipeline(schedule="pipedream"),
        microbatches=1,
    )
    model.optimizer = OPTIMIZERS["sgd"](model.parameters())
    losses = [float(model.train_step(**microbatches_of(ONE, step)[0][1])) for step in range(STEPS)]
    return Trained(losses, {name: whole(p) for name, p in model.named_parameters()})  # type: ignore[misc]


def _plainly() -> Trained:
    model = build(ONE)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    losses = losses_of(optimizer, range(STEPS), lambda step: loss_of(ONE, model(**microbatches_of(ONE, step)[0][1])))
    return Trained(losses, {name: p.detach() for name, p in model.named_parameters()})


def test_one_micro_batch_is_a_plain_step_of_its_optimizer(ranks: Ranks) -> None:
    _check(ranks.run(_one_micro_batch, world_size=2, timeout=180), _plainly())


def _without_an_optimizer() -> str:
    case = PipelineCase("mlp", "pp2", "pipedream")
    model = compiled(case)
    args, _ = batch_of(microbatches_of(case, 0))
    with pytest.raises(PipelineError) as caught:
        model.train_step(*args)
    model.optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.train_step(*args)
    return str(caught.value)


def _tied() -> str:
    with pytest.raises(PipelineError) as caught:
        compiled(PipelineCase("gpt2", "pp2", "pipedream"))
    return str(caught.value)


def test_a_step_without_an_optimizer_says_how_to_set_it(ranks: Ranks) -> None:
    for message in ranks.run(_without_an_optimizer):
        assert 'Pipeline(schedule="pipedream") updates the weights inside train_step' in message
        assert "set model.optimizer = " in message


def test_tied_weights_of_several_stages_are_refused_by_name(ranks: Ranks) -> None:
    for message in ranks.run(_tied):
        assert 'Pipeline(schedule="pipedream") updates every stage by itself, and transformer.wte.weight' in message
