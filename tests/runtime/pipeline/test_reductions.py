"""Reductions of gradients overlap with the last backward of a stage, in an order that is the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.optim.clipping import clip_grad_norm_
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, distance, whole
from tests.support.pipeline_training import (
    PipelineCase,
    accumulated,
    batch_of,
    build,
    check,
    compiled,
    microbatches_of,
    parallel,
    stage_bytes_of,
    train_alone,
)
from tests.support.ranks import Ranks, mesh

WIDTH = 1024  # a weight of 4 MiB has a message of its own
LAYERS, MICROBATCHES = 4, 2


class Layers(nn.Module):
    """Products of square weights without biases, two for each stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD.square().mean()


class Operations(TorchDispatchMode):
    """The names of what runs inside the block, in order, of a few operations."""

    NAMES = ("mm", "all_reduce_", "reduce_scatter_tensor", "wait_tensor", "send")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in self.NAMES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _operations(strategy: str, schedule: str, names: tuple[str, ...], shape: tuple[int, ...]) -> list[str]:
    x_BD = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"schedule": schedule} if "pp" in names else {}
    model = autopar.compile(
        *(Layers(), mesh(shape, names), (x_BD,)),
        hardware=SLOW_DEVICES,
        strategy=strategy,
        microbatches=MICROBATCHES,
        **by_flag(**options),
    )
    model.train_step(x_BD)
    with Operations() as operations:
        model.train_step(x_BD)
    return operations.names


def _last(names: Sequence[str], name: str) -> int:
    return len(names) - 1 - list(reversed(names)).index(name)


@pytest.mark.filterwarnings("ignore:zero1")
@pytest.mark.parametrize(
    ("strategy", "reduction"), [("data_parallel", "all_reduce_"), ("zero1", "reduce_scatter_tensor")]
)
def test_the_last_backward_of_a_stage_starts_reductions_and_waits_for_none(
    ranks: Ranks, strategy: str, reduction: str
) -> None:
    *_, names = ranks.run(_operations, strategy, "1f1b", ("pp", "dp"), (2, 2), world_size=4)
    first, sent = names.index(reduction), _last(names, "send")
    assert names.count(reduction) == 2, "one for each weight"
    assert names[first:sent].count("mm") == 2, "both products of the backward of the layer before"
    assert "wait_tensor" not in names[first:sent]
    assert names[sent:].count("wait_tensor") == 3, "those of both weights, and the sum of the loss"


@pytest.mark.filterwarnings("ignore:zero1")
def test_gradients_of_weights_made_apart_are_reduced_next_to_those_of_further_stages(ranks: Ranks) -> None:
    *_, names = ranks.run(_operations, "zero1", "interleaved_zero_bubble", ("pp", "dp"), (2, 2), world_size=4)
    first, last = names.index("reduce_scatter_tensor"), _last(names, "reduce_scatter_tensor")
    assert "mm" in names[first:last] and "send" in names[first:last]
    assert "wait_tensor" not in names[first:last]


@pytest.mark.filterwarnings("ignore:zero1")
def test_micro_batches_without_a_pipeline_are_reduced_next_to_the_last_backward(ranks: Ranks) -> None:
    names, _ = ranks.run(_operations, "zero1", "", ("dp",), (2,))
    first, last = names.index("reduce_scatter_tensor"), _last(names, "mm")
    assert names.count("reduce_scatter_tensor") == LAYERS
    assert names[first:last].count("reduce_scatter_tensor") == LAYERS - 1
    assert first > names.index("mm") + (MICROBATCHES - 1) * (3 * LAYERS - 1), "not in the backward before"


def _case(strategy: str, schedule: str, family: str = "gpt2", **options: Any) -> PipelineCase:
    return PipelineCase(family, "pp2xdp2", schedule, options={"strategy": strategy, **options}, steps=2)


STRATEGIES = ("data_parallel", "zero1", "zero2")


@pytest.mark.filterwarnings("ignore:zero1")
@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        ("data_parallel", "interleaved_1f1b"),
        *(
            pytest.param(strategy, schedule, marks=pytest.mark.slow)
            for strategy in STRATEGIES
            for schedule in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
        ),
    ],
)
def test_reduced_gradients_of_tied_weights_are_those_of_one_process(ranks: Ranks, strategy: str, schedule: str) -> None:
    check(ranks, _case(strategy, schedule))


def _clipped(case: PipelineCase) -> list[float]:
    """Train with clipping next to one process; return the norms of every step."""
    model, alone = compiled(case), build(case)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-4) for each in (model, alone)]
    norms = []
    for step in range(case.steps):
        for each in optimizers:
            each.zero_grad()
        args, kwargs = batch_of(microbatches_of(case, step))
        assert_close(float(model.train_step(*args, **kwargs)), accumulated(case, alone, step), rtol=1e-4, atol=1e-5)
        norms.append(float(model.clip_grad_norm_(0.1)))
        assert_close(norms[-1], float(clip_grad_norm_(alone.parameters(), 0.1)), rtol=1e-4, atol=1e-5)
        for each in optimizers:
            each.step()
    theirs = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(whole(parameter), theirs[name].detach(), rtol=1e-4, atol=1e-5)
    return norms


@pytest.mark.filterwarnings("ignore:zero1")
def test_clipping_waits_for_what_is_reduced(ranks: Ranks) -> None:
    (first, *others) = ranks.run(_clipped, _case("zero1", "interleaved_zero_bubble"), world_size=4)
    assert first[0] > 0.1 and all(each == first for each in others)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zero1")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_mixed_precision_rounds_no_worse_than_on_one_process(ranks: Ranks, strategy: str, schedule: str) -> None:
    case = _case(strategy, schedule, "llama", precision="bf16-mixed")
    precise = train_alone(case)
    one = replace(case, mesh="one", options={"precision": "bf16-mixed"})
    (alone,) = ranks.run(parallel, one, world_size=1)
    for training in ranks.run(parallel, case, world_size=4, timeout=180):
        measure = distance(stage_bytes_of(training, alone), stage_bytes_of(training, precise))
        for kind, far in distance(training, stage_bytes_of(training, precise)).items():
            known = max(measure[kind], torch.finfo(torch.bfloat16).eps ** 2)
            assert far <= 2 * known, f"{kind}: {far:.3g} from float32, one process {measure[kind]:.3g}"
