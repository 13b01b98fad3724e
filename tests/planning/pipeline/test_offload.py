"""Pipelines whose stages leave what their layers keep to the host: bytes, seconds, choices and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.load import load
from autopar.errors import InfeasibleError, PipelineError
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.choice import chunks_of
from autopar.planning.pipeline.schedules.schedule import NAMES, Schedule
from autopar.planning.settings import context_of
from tests.support.options import by_flag
from tests.support.towers import tower

FAST_LINK = replace(load("h100"), name="h100", host_link_bytes_per_s=1e15, host_memory_bytes_per_s=1e16)
"""Copies take next to nothing."""

BUSY = replace(load("h100"), launch_s=1e-9, host_link_bytes_per_s=16e9)
"""Next to nothing waits for the host's launches, which would hide copies over its slow link."""


class Scored(nn.Module):
    """A tower that gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(8, 64, "meta")

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.layers(x_BD).square().mean()


def planned(axes: dict[str, int] | None = None, **options: Any) -> PipelinePlan:
    specified = {"schedule": "1f1b", "microbatches": 4, "optimizer": "sgd", "hardware": "h100", **options}
    specified = {"memory_conventions": "tensors", **specified}
    found = autopar.plan(
        Scored(), autopar.Mesh(axes or {"pp": 2}, hardware="h100"), (torch.zeros(4096, 64),), **by_flag(**specified)
    )
    assert isinstance(found, PipelinePlan)
    return found


@pytest.mark.slow
def test_each_micro_batch_in_flight_has_its_own_on_the_host(tmp_path: Path) -> None:
    here, away = (planned(offload=each, hardware=BUSY) for each in ("none", "activations"))
    assert here.offload == "none" and here.host_bytes == 0 and away.offload == "activations"
    for stage, before in zip(away.stages, here.stages, strict=True):
        resident, left = (sum(row.saved_bytes for row in each.plan.rows) for each in (stage, before))
        assert stage.plan.host == {"activations": (left - resident) * away.schedule.in_flight(stage.number)}
        assert set(stage.plan.recompute.values()) == {OFFLOAD}
        assert stage.seconds.forward > before.seconds.forward
    assert [away.rank_host(rank) for rank in (0, 1)] == [stage.plan.host for stage in away.stages]
    assert away.host == away.rank_host(0) and away.host_bytes == 2 * sum(away.rank_host(1).values())
    assert away.peak_bytes < 0.6 * here.peak_bytes and away.seconds > here.seconds
    assert not away.notes
    within = planned(offload="activations", memory=away.peak_bytes)
    (note,) = [each for each in within.notes if "on the host" in each]
    assert note.startswith("what layers save for their backward is on the host") and "without a limit takes" in note
    assert "of its memory per device" in str(away)
    away.save(tmp_path / "plan.json")
    assert PipelinePlan.load(tmp_path / "plan.json") == away


@pytest.mark.parametrize("launch_s", [BUSY.launch_s, 0.0], ids=["device", "host"])
def test_equal_blocks_whose_copies_are_waited_for_are_cut_evenly(launch_s: float) -> None:
    """The copies of a block count in the block, not in those that wait for them; on a host, nothing overlaps."""
    away = planned(offload="activations", hardware=replace(BUSY, launch_s=launch_s))
    assert away.offload == "activations" and away.starts == (0, 4)


def test_stages_of_a_rank_do_not_wait_at_once() -> None:
    """Check that a rank's host bytes are those of the micro-batches in flight together, over all of its stages."""
    away = planned(schedule="interleaved_1f1b", stages_per_rank=2, offload="activations")
    of_stages = [stage.plan.host_bytes for stage in away.stages]
    each = {number: of_stages[number] // away.schedule.in_flight(number) for number in (0, 2)}
    together = away.schedule.most_waiting(0, each)
    assert away.rank_host(0) == {"activations": together} and together < of_stages[0] + of_stages[2]


@pytest.mark.slow
def test_a_host_is_shared_by_the_devices_of_all_stages() -> None:
    narrow = replace(load("h100"), host_memory_bytes_per_s=1e9)
    away = planned({"pp": 2, "dp": 2}, offload="activations", strategy="zero3", hardware=narrow)
    for stage in away.stages:
        context = context_of(stage.plan)
        assert context.space.devices_on_host == 4
        assert context.memory_model.host_copies.bytes_per_s == 1e9 / 4
    both = planned({"pp": 2, "dp": 2}, offload="both", strategy="zero3", optimizer="adamw")
    assert both.offload == "both" and both.offloads_optimizer
    needed = 4 * both.host_bytes
    specified: dict[str, Any] = {"offload": "both", "strategy": "zero3", "optimizer": "adamw"}
    less = planned({"pp": 2, "dp": 2}, host_memory=needed - 1, **specified)
    assert 0 < less.host["activations"] < both.host["activations"] and 4 * less.host_bytes < needed
    assert any("the host has room for what 3 layers of a stage save" in note for note in less.notes)
    state = 4 * (both.host_bytes - both.host["activations"])
    with pytest.raises(
        InfeasibleError, match=rf"\({needed} bytes\) for the 4 that share a host, but Memory.host_limit=…. is"
    ):
        planned({"pp": 2, "dp": 2}, host_memory=state, **specified)


@pytest.mark.slow
def test_stages_leave_what_a_limit_asks_for() -> None:
    limit = int(0.6 * planned().peak_bytes)
    again = planned(memory=limit)
    found = planned(memory=limit, offload="activations", hardware=FAST_LINK)
    assert found.offload == "activations" and found.peak_bytes <= limit and found.seconds < again.seconds
    assert OFFLOAD in found.stages[0].plan.recompute.values() and found.memory_limit == limit
    alone = planned(memory=limit, offload="activations", recompute="none", hardware=FAST_LINK)
    assert set(alone.stages[0].plan.recompute.values()) <= {"none", OFFLOAD}
    with pytest.raises((InfeasibleError, PipelineError)):
        planned(memory=limit, recompute="none")


@pytest.mark.slow
def test_the_cheapest_is_taken_of_itself() -> None:
    specified: dict[str, Any] = {"optimizer": "adamw", "offload": "auto"}
    assert planned(**specified).offload == "none"
    limit = int(0.6 * planned(optimizer="adamw").peak_bytes)
    fast = planned(memory=limit, hardware=FAST_LINK, **specified)
    assert fast.offload in ("activations", "both") and fast.peak_bytes <= limit
    assert any("on the host" in note for note in fast.notes)


@pytest.mark.slow
def test_what_may_not_leave_or_costs_too_much_stays() -> None:
    specified: dict[str, Any] = {"optimizer": "adamw", "offload": "auto"}
    limit = int(0.6 * planned(optimizer="adamw").peak_bytes)
    slow = planned(memory=limit, hardware=replace(load("h100"), host_link_bytes_per_s=1e6), **specified)
    assert slow.offload == "none"
    halving = planned(memory=limit, schedule="zbv", hardware=FAST_LINK, **specified)
    assert halving.offload in ("none", "optimizer") and halving.peak_bytes <= limit


def test_what_both_say_of_a_limit_is_stated_once() -> None:
    with pytest.raises(PipelineError) as error:
        planned(memory=1000, offload="auto", optimizer="adamw")
    assert str(error.value).count("does not fit even with block 0") == 1


def test_backwards_in_halves_are_refused_and_not_chosen() -> None:
    for offload in ("activations", "both"):
        with pytest.raises(
            PipelineError,
            match=f"offload='{offload}'. sends what .*\"zbv\". makes gradients .* apart, .*; give Pipeline.schedule",
        ):
            planned(schedule="zbv", offload=offload, optimizer="adamw")
    assert planned(schedule=None).schedule.halves_backwards
    assert not planned(schedule=None, offload="activations").schedule.halves_backwards


@pytest.mark.parametrize("name", NAMES)
def test_what_halves_backwards_has_steps_of_both_kinds(name: str) -> None:
    schedule = Schedule(name, 2, 8, chunks_of(name, None))
    assert schedule.halves_backwards == any(step.kind in ("I", "W") for order in schedule.orders for step in order)


@pytest.mark.slow
def test_meshes_with_pipelines_are_looked_at_where_no_other_fits() -> None:
    inputs, model = (torch.zeros(4096, 64),), Scored()
    with pytest.raises(InfeasibleError, match="In stages of a pipeline"):  # that activations may leave is no hindrance
        specified: dict[str, Any] = {"hardware": "h100", "memory_conventions": "tensors", "optimizer": "sgd"}
        autopar.plan(model, "auto", inputs, devices=2, **by_flag(memory="1200kB", offload="activations", **specified))
