"""A tied embedding on its second stage is gathered, and its gradient reduced, as often as any other weight there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.settings import context_of
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from autopar.tools.benchmarking.meters import CollectiveCounter
from tests.support.optimizing import losses_of
from tests.support.parity import whole
from tests.support.pipeline_training import PipelineCase, check
from tests.support.ranks import Ranks, mesh

VOCABULARY, HIDDEN, LAYERS = 256, 32, 4
STAGE_BYTES = 2 * (VOCABULARY * HIDDEN + LAYERS // 2 * (HIDDEN + 1) * HIDDEN)
"""Bytes of a stage's weights in bfloat16: half of the layers, and the table that both stages have."""
GATHERED, REDUCED = ("all_gather", "dp"), ("reduce_scatter", "dp")


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSD = self.table(ids_BS)
        for layer in self.layers:
            x_BSD = x_BSD + torch.relu(layer(x_BSD))
        return F.cross_entropy(self.head(x_BSD).flatten(0, 1), labels_BS.flatten())


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids_BS, labels_BS = torch.randint(0, VOCABULARY, (2, 16, 8), generator=generator)
    return ids_BS, labels_BS


def _planned(strategy: str, precision: str = "bf16-mixed") -> list[dict[str, tuple[bool, bool]]]:
    """Weight of each stage → whether each micro-batch gathers it, and whether each reduces its gradient."""
    plan = autopar.plan(
        Tied(),
        Mesh({"pp": 2, "dp": 2}, hardware="h100"),
        _batch(0),
        strategy=strategy,
        precision=precision,
        pipeline=autopar.Pipeline(schedule="1f1b", split_points=["layers.2"]),
        microbatches=4,
    )
    assert isinstance(plan, PipelinePlan)
    found: list[dict[str, tuple[bool, bool]]] = []
    for stage in plan.stages:
        context = context_of(stage.plan)
        more, choices, of_stage = context.memory_model.accumulation, context.choices, {}
        for edge in context.space.edges:
            if more.is_weight(edge) and context.space.decisions[edge.target].kind == "call":
                both = (each(edge) for each in (more.each_time, more.reduced_each_time))
                name = context.space.decisions[edge.source].name
                of_stage[name] = tuple(
                    bool(np.broadcast_to(each, more.each_time(edge).shape)[choices[edge.source], choices[edge.target]])
                    for each in both
                )
        found.append(of_stage)
    return found


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp32"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_plan_gathers_a_tied_weight_once_a_step(strategy: str, precision: str) -> None:
    """ZeRO-2 reduces the gradients of each micro-batch by definition, of the table as of other weights."""
    for weights in _planned(strategy, precision):
        assert len(weights) >= 5
        assert not any(gathers for gathers, _ in weights.values())
        if strategy == "zero1":
            assert not any(reduces for _, reduces in weights.values())


def test_a_tied_weight_is_gathered_again_where_that_is_requested() -> None:
    _, last = _planned("zero3")
    assert any(gathers for gathers, _ in last.values())


@dataclass(frozen=True, slots=True)
class Ran:
    """The bytes and calls of a step, by collective and axis, the losses, and the parameters after the last step."""

    num_bytes: Mapping[tuple[str, str], int]
    calls: Mapping[tuple[str, str], int]
    losses: list[float]
    parameters: Mapping[str, Tensor]


def _ran(strategy: str, microbatches: int) -> Ran:
    on = mesh((2, 2), ("pp", "dp"))
    module = autopar.compile(
        Tied(),
        on,
        _batch(0),
        strategy=strategy,
        precision="bf16-mixed",
        pipeline=autopar.Pipeline(schedule="1f1b", split_points=["layers.2"]),
        microbatches=microbatches,
    )
    assert isinstance(module, PipelineModule)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses, counter = [], CollectiveCounter({})
    for step in range(3):
        optimizer.zero_grad()
        counter = CollectiveCounter({on.get_group(axis).group_name: axis for axis in ("pp", "dp")})
        with counter:
            losses.append(float(module.train_step(*_batch(step))))
        optimizer.step()
    parameters = {name: whole(each) for name, each in module.named_parameters()}
    traffic = counter.traffic
    return Ran(dict(traffic.num_bytes), dict(traffic.calls), losses, parameters)  # type: ignore[arg-type]


def _alone() -> tuple[list[float], Mapping[str, Tensor]]:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = losses_of(optimizer, range(3), lambda step: model(*_batch(step)))
    return losses, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_ranks_gather_a_tied_weight_once_a_step_and_train_as_one_process(ranks: Ranks, strategy: str) -> None:
    few, many = (ranks.run(_ran, strategy, count, world_size=4, timeout=120) for count in (2, 4))
    losses, parameters = _alone()
    start = {name: each.detach() for name, each in Tied().named_parameters()}
    for one, other in zip(few, many, strict=True):
        assert one.num_bytes[GATHERED] == other.num_bytes[GATHERED] == STAGE_BYTES
        assert one.calls[GATHERED] == other.calls[GATHERED]
        more = 1 if strategy == "zero1" else 2
        assert other.num_bytes[REDUCED] == more * one.num_bytes[REDUCED]
        assert other.losses == pytest.approx(losses, rel=0.01)
        for name, each in other.parameters.items():
            moved = (parameters[name] - start[name]).norm()
            assert (each - parameters[name]).norm() < 0.1 * moved, f"{name} but for rounding to bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_tied_model_trains_as_one_process(ranks: Ranks, strategy: str) -> None:
    check(ranks, PipelineCase("gpt2", "pp2xdp2", options={"strategy": strategy}))
