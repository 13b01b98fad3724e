"""Weights in tiles: offered on request, chosen if a limit leaves no room for a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import capture
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.options.groups import Memory
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings, context_of
from autopar.strategies.rules.products import tiled
from autopar.strategies.rules.products.tiled import NAME
from tests.support.measured_bytes import peak_of_step
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import Steps, train_alike

TILE_BYTES, WIDTH, HIDDEN = 2**17, 128, 2048  # a weight is a megabyte


class Wide(nn.Module):
    """Two layers, nearly all of whose memory are weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).square().mean()


INPUTS = {"x": torch.ones(4, WIDTH)}


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with mock.patch.object(tiled, "TILE_BYTES", TILE_BYTES):
        yield


def planned(
    memory: int | str | None, axes: dict[str, int] | None = None, model: nn.Module | None = None, **options: Any
) -> Plan:
    model, on = model or Wide(), Mesh(axes or {"dp": 4})
    inputs = {"x": INPUTS["x"].to(next(model.parameters()).dtype)}
    options = {"memory": memory, "hardware": SLOW_DEVICES, "optimizer": "sgd", "strategy": "zero3", **options}
    found = autopar.plan(model, on, inputs, **by_flag(**options))
    assert isinstance(found, Plan)
    return found


def in_tiles(plan: Plan) -> list[str]:
    return [name for name in plan.choices.values() if name.endswith(NAME)]


def between(axes: dict[str, int] | None = None, model: nn.Module | None = None) -> int:
    """A limit below what is needed with whole weights, and above what is needed with tiles."""
    least = []
    for weight_tiles in (True, False):
        with pytest.raises(InfeasibleError, match="the memory limit is") as refused:
            planned(10, axes, model, weight_tiles=weight_tiles)
        least.append(int(str(refused.value).split("at least ")[1].split("(")[1].split(" bytes")[0]))
    assert least[0] < 0.9 * least[1]
    return sum(least) // 2


def test_they_stand_among_candidates_only_where_they_are_requested() -> None:
    program = capture(Wide(), (), INPUTS, training=True)

    def names(request: PlanRequest) -> list[str]:
        space = request.space(program, Mesh({"dp": 2}))
        return [str(each) for each in space.decisions[space.index["linear_default"]].candidates.strategies]

    request = PlanRequest(settings=Settings(Memory(10**9)), hardware=SLOW_DEVICES)
    before, after = names(request), names(request.with_memory(replace(request.memory, weight_tiles=True)))
    assert set(after) - set(before) == {f"o+...0 via {NAME}", f"k+...0 via {NAME}"}


def test_a_limit_without_room_for_a_whole_weight_is_kept_by_tiles(tmp_path: Path) -> None:
    limit = between()
    with pytest.raises(InfeasibleError, match="the memory limit is"):
        planned(limit)
    plan = planned(limit, weight_tiles=True)
    assert plan.peak_bytes <= limit and in_tiles(plan)
    assert plan.verify().ok
    again = plan.reprice()
    assert again.memory["memory"] == plan.peak_bytes and again.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert again.traffic == {key: count for key, count in plan.traffic.items() if count}
    plan.save(tmp_path / "plan.json")
    attached = Plan.load(tmp_path / "plan.json").attach(Wide(), INPUTS, hardware=SLOW_DEVICES, optimizer="sgd")
    assert context_of(attached).choices == context_of(plan).widened().choices
    assert attached.timeline().seconds == plan.timeline().seconds


def test_no_limit_leaves_weights_whole() -> None:
    assert not in_tiles(planned("1GB", weight_tiles=True))
    with pytest.raises(InputError, match=r"weight_tiles=True\) has weights .* none is given; give a limit, as in"):
        planned(None, weight_tiles=True)


@pytest.mark.parametrize(
    "axes",
    [pytest.param({"dp": 4}, id="one axis"), pytest.param({"dp": 2, "tp": 2}, id="two axes", marks=pytest.mark.slow)],
)
def test_plans_that_have_them_train_as_one_process_does(axes: dict[str, int]) -> None:
    steps = Steps([{"x": torch.randn(4, WIDTH, dtype=torch.float64)} for _ in range(2)])
    limit = between(axes, Wide().double())
    options = {"memory": limit, "weight_tiles": True, "optimizer": "sgd", "strategy": "zero3"}
    plan = train_alike(Wide().double(), steps, axes, options)
    assert len(in_tiles(plan)) >= 1


def _measured(limit: int) -> tuple[int, int, int]:
    """Bytes at the highest moment of the second step on this rank, those of the plan, and products in tiles."""
    with mock.patch.object(tiled, "TILE_BYTES", TILE_BYTES):
        compiled: Any = autopar.compile(
            Wide(),
            mesh((4,), ("dp",)),
            INPUTS,
            memory=autopar.Memory(limit, weight_tiles=True),
            strategy="zero3",
            optimizer="sgd",
            hardware=SLOW_DEVICES,
        )
        held = peak_of_step(compiled, INPUTS, torch.optim.SGD(compiled.parameters(), lr=0.1))
        return held, compiled.plan.peak_bytes, len(in_tiles(compiled.plan))


def test_ranks_hold_what_the_plan_predicts(ranks: Ranks) -> None:
    limit = between()
    for held, predicted, number in ranks.run(_measured, limit, world_size=4):
        assert number and predicted == pytest.approx(held, rel=0.1)
        assert held <= limit
