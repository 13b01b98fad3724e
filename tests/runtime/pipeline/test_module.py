"""Behaviour that a pipeline preserves besides the numbers of known models: dropout masks, odd tensors, outputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import autopar
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from tests.support.families import HIDDEN
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, assert_same_gradients, whole
from tests.support.pipeline_training import (
    PipelineCase,
    accumulated,
    batch_of,
    build,
    compiled,
    loss_of,
    microbatches_of,
    train,
)
from tests.support.ranks import Ranks, mesh

MICROBATCHES = 4


class Scaled(nn.Module):
    """Its input times a weight, half of it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x_BD: Tensor) -> Tensor:
        return nn.functional.dropout(x_BD * self.weight, 0.5, self.training)


class Masks(nn.Module):
    """Two parallel layers. A weight's gradient is what its layer kept of each sample, times the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.first(x_BD).sum() + self.second(x_BD).sum()


def _masks(shape: tuple[int, ...], names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    """Layer and step → bool[micro-batch, hidden]: what was kept of the one sample in each micro-batch."""
    # Sample i is 4^i, of which dropout keeps twice as much or nothing: the digits of the gradient are the masks.
    x_BD = (4.0 ** torch.arange(MICROBATCHES))[:, None].expand(MICROBATCHES, HIDDEN)
    pipeline: dict[str, Any] = {"schedule": "1f1b", "split_points": ["second"]} if "pp" in names else {}
    model = autopar.compile(
        Masks(),
        mesh(shape, names),
        (x_BD,),
        hardware=SLOW_DEVICES,
        microbatches=MICROBATCHES,
        **by_flag(seed=seed, **pipeline),
    )
    found = {}
    for step in range(2):
        model.zero_grad()
        model.train_step(x_BD)
        for name, parameter in model.named_parameters():
            digits = [(MICROBATCHES * whole(parameter.grad) // 4**i) % 4 for i in range(MICROBATCHES)]  # type: ignore[operator]
            found[f"{name} {step}"] = torch.stack(digits) > 0
    return found


def test_masks_differ_between_micro_batches_stages_and_steps_and_are_those_of_one_stage(ranks: Ranks) -> None:
    found = {}
    for held in ranks.run(_masks, (2,), ("pp",), 5):
        assert len(held) == 2, "a layer on each rank"
        found |= held
    again = {name: mask for held in ranks.run(_masks, (2,), ("pp",), 5) for name, mask in held.items()}
    other = {name: mask for held in ranks.run(_masks, (2,), ("pp",), 6) for name, mask in held.items()}
    [alone] = ranks.run(_masks, (1,), ("dp",), 5, world_size=1)
    assert found.keys() == alone.keys()
    for name, mask in found.items():
        assert torch.equal(mask, again[name]) and torch.equal(mask, alone[name]) and not torch.equal(mask, other[name])
    rows = [row for mask in found.values() for row in mask]
    assert len(rows) == 2 * 2 * MICROBATCHES
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(rows, 2))
    assert 0.4 < torch.stack(rows).float().mean() < 0.6


def _losses_with_dropout(mesh_name: str, schedule: str, recompute: str) -> list[float]:
    case = PipelineCase("gpt2", mesh_name, schedule, options={"recompute": recompute}, dropout=0.2, steps=2)
    model = compiled(case)

    def step(number: int) -> float:
        args, kwargs = batch_of(microbatches_of(case, number))
        return float(model.train_step(*args, **kwargs))

    return train(case, model, step).losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("zbv", "full")])
def test_a_model_with_dropout_trains_in_a_pipeline_as_in_one_stage(ranks: Ranks, schedule: str, recompute: str) -> None:
    [expected] = ranks.run(_losses_with_dropout, "one", schedule, "none", world_size=1)
    found = ranks.run(_losses_with_dropout, "pp2", schedule, recompute)
    assert found[0] == found[1]
    assert_close(torch.tensor(found[0]), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert ranks.run(_losses_with_dropout, "pp2", schedule, recompute) == found


class Gated(nn.Module):
    """Layers of which the first one's output, as booleans and as indices, decides about the output of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.table = nn.Embedding(HIDDEN, HIDDEN)

    def forward(self, x_BD: Tensor) -> dict[str, Any]:
        x_BD = self.layers[0](x_BD)
        positive_BD, largest_B = x_BD > 0, x_BD.argmax(-1)
        for layer in self.layers[1:]:
            x_BD = layer(x_BD.tanh())
        y_BD = torch.where(positive_BD, x_BD, 0.0) + self.table(largest_B)
        return {"logits": y_BD, "loss": y_BD.square().mean(), "largest": largest_B, "name": "gated"}


def gated() -> Gated:
    torch.manual_seed(1)
    return Gated()


def _vectors(seed: int = 0) -> Tensor:
    return torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(seed))


def _on_pipeline(model: nn.Module, **options: Any) -> PipelineModule:
    common = {"hardware": SLOW_DEVICES, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    options = {**common, "mesh": mesh((2,), ("pp",)), **options}
    found = autopar.compile(model, options.pop("mesh"), (_vectors(),), **by_flag(**options))
    assert isinstance(found, PipelineModule)
    return found


def _odd_tensors(schedule: str) -> None:
    model, alone = _on_pipeline(gated(), schedule=schedule), gated()
    pipeline = model.prepare((_vectors(),), {})
    last = pipeline.programs[-1]
    nodes = last.placeholders()
    assert {nodes[name].meta["tensor"].dtype for name in last.received} >= {torch.bool, torch.int64}
    expected = torch.zeros(())
    for x_BD in _vectors().chunk(MICROBATCHES):
        loss = alone(x_BD)["loss"] / MICROBATCHES
        loss.backward()
        expected += loss.detach()
    assert_close(model.train_step(_vectors()), expected)
    assert_same_gradients(model, alone)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
def test_booleans_and_integers_cross_cuts(ranks: Ranks, schedule: str) -> None:
    ranks.run(_odd_tensors, schedule)


def _evaluated(shape: tuple[int, ...], names: tuple[str, ...], outputs: str) -> None:
    model, alone = _on_pipeline(gated(), mesh=mesh(shape, names), outputs=outputs), gated().eval()
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            found = model(_vectors(2))
        expected = alone(_vectors(2))
        assert found.keys() == expected.keys() and found["name"] == "gated"
        for name in ("logits", "loss", "largest"):
            assert isinstance(found[name], DTensor) == (outputs == "dtensor" and name != "loss")
            assert_close(whole(found[name]), expected[name].detach())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "names", "outputs"),
    [
        ((2,), ("pp",), "dtensor"),
        ((2, 2), ("pp", "tp"), "dtensor"),
        ((2, 2), ("dp", "pp"), "full"),
        ((2, 2), ("pp", "tp"), "plain"),
    ],
)
def test_evaluation_gives_every_output_on_every_rank(
    ranks: Ranks, shape: tuple[int, ...], names: tuple[str, ...], outputs: str
) -> None:
    ranks.run(_evaluated, shape, names, outputs, world_size=2 * len(shape))


def _counted(count: int) -> dict[tuple[str, str], int]:
    model = _on_pipeline(
        gated(),
        mesh=mesh((2, 2), ("pp", "dp")),
        strategy="data_parallel",
        microbatches=count,
        split_points=["layers.2"],
    )
    with record_traffic() as traffic:
        model.train_step(_vectors())
    return dict(traffic.calls)


def test_gradients_and_the_loss_are_reduced_once_per_step_however_many_micro_batches(ranks: Ranks) -> None:
    few, many = (ranks.run(_counted, count, world_size=4) for count in (2, 8))
    reduce = ("all_reduce", "dp")
    for rank in range(4):
        assert few[rank].keys() == many[rank].keys() == {reduce}
        assert many[rank][reduce] == few[rank][reduce] == (2 if rank >= 2 else 1)  # the loss's sum on the last stage


def _again() -> None:
    case = PipelineCase("gpt2", "pp2", steps=1)  # whose ends share a weight
    model, alone = compiled(case), build(case)
    for step in range(2):
        args, kwargs = batch_of(microbatches_of(case, step))
        assert_close(float(model.train_step(*args, **kwargs)), accumulated(case, alone, step), rtol=1e-4, atol=1e-5)
    assert_same_gradients(model, alone, rtol=1e-3, atol=1e-5)


def test_gradients_of_several_steps_add_up(ranks: Ranks) -> None:
    ranks.run(_again)


def _frozen_stage() -> list[str]:
    model, alone = gated(), gated()
    for each in (model, alone):
        each.layers[0].requires_grad_(False)
        each.layers[1].requires_grad_(False)
    parallel = _on_pipeline(model, split_points=["layers.2"])
    loss = parallel.train_step(_vectors())
    alone(_vectors())["loss"].backward()
    assert_close(loss, alone(_vectors())["loss"].detach())
    assert_same_gradients(parallel, alone)
    return [name for name, parameter in parallel.named_parameters() if parameter.grad is not None]


def test_a_rank_may_have_nothing_to_train(ranks: Ranks) -> None:
    first, last = ranks.run(_frozen_stage)
    assert not first and len(last) == 5


def _parameters_frozen_later() -> None:
    model, alone = _on_pipeline(gated(), split_points=["layers.2"]), gated()
    model.train_step(_vectors())
    model.zero_grad()
    for each in (model, alone):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("layers.1" not in name)
    model.train_step(_vectors())
    alone(_vectors())["loss"].backward()
    assert_same_gradients(model, alone)


def test_parameters_may_be_frozen_between_steps(ranks: Ranks) -> None:
    ranks.run(_parameters_frozen_later)


def _watched() -> None:
    model = _on_pipeline(gated(), split_points=["layers.2"])
    seen: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()))
    model.train_step(_vectors())
    for name, parameter in model.named_parameters():
        (gradient,) = seen[name]
        assert_close(gradient, parameter.grad)


def test_a_hook_of_a_parameter_sees_the_gradient_of_all_micro_batches_at_once(ranks: Ranks) -> None:
    ranks.run(_watched)


def _other_batches(family: str, evaluated_first: bool) -> None:
    """Batches of several sizes, between them evaluations: what each rank holds stays with it."""
    case = PipelineCase(family, "pp2xtp2")
    model, alone = build(case), build(case)
    if evaluated_first:
        model.eval()
    parallel = compiled(case, model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-4) for each in (parallel, alone)]
    for step, share in enumerate((1, 2, 1)):
        parallel.train()
        alone.train()
        parts = [_first_rows(part, share) for part in microbatches_of(case, step)]
        args, kwargs = batch_of(parts)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = torch.zeros(())
        for part_args, part_kwargs in parts:
            loss = loss_of(case, alone(*part_args, **part_kwargs)) / len(parts)
            loss.backward()
            expected += loss.detach()
        assert_close(parallel.train_step(*args, **kwargs), expected, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
        parallel.eval()
        alone.eval()
        with torch.no_grad():
            found, expected = loss_of(case, parallel(*args, **kwargs)), loss_of(case, alone(*args, **kwargs))
        assert_close(whole(found), expected, rtol=1e-4, atol=1e-5)
    theirs = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    for name, value in (*parallel.named_parameters(), *parallel.named_buffers()):
        assert_close(whole(value), theirs[name].detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _first_rows(inputs: Any, share: int) -> Any:
    args, kwargs = inputs
    cut = lambda x: x[: len(x) // share]  # noqa: E731
    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "evaluated_first"),
    [("gpt2", False), *(pytest.param("resnet", each, marks=pytest.mark.slow) for each in (True, False))],
)
def test_batches_of_other_sizes_and_evaluations_run_on_the_same_stages(
    ranks: Ranks, family: str, evaluated_first: bool
) -> None:
    ranks.run(_other_batches, family, evaluated_first, world_size=4, timeout=120)


def _lazily() -> None:
    model = autopar.compile(
        gated(), mesh((2,), ("pp",)), hardware=SLOW_DEVICES, pipeline=autopar.Pipeline(schedule="1f1b"), microbatches=4
    )
    eager = _on_pipeline(gated())
    assert torch.equal(model.train_step(_vectors()), eager.train_step(_vectors()))
    assert_same_gradients(model, eager)


def test_a_pipeline_may_be_planned_on_its_first_step(ranks: Ranks) -> None:
    ranks.run(_lazily)
