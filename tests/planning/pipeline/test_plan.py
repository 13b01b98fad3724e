"""The plan of a pipeline: what its stages come to, how it is printed, saved and loaded."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.plans.decision_rows import MemoryUse
from autopar.costs.plans.plan import Plan
from autopar.costs.steps.sends import Send
from autopar.errors import PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import REDUCING, PipelinePlan, StagePlan
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate
from autopar.planning.pipeline.stage_seconds import stage_seconds, step_parts, weight_seconds
from autopar.planning.planner import make_plan
from autopar.planning.settings import context_of
from autopar.planning.step_seconds import reduction_seconds
from tests.runtime.rewrite.test_prefetch import WIDTH, Stack
from tests.support.mutations import mutated
from tests.support.planned import IDS_BS, Attention, TwoLinears, space_of


def stage_plan(number: int, peak_bytes: int = 900, working: int = 300) -> Plan:
    return Plan(
        mesh=Mesh({"tp": 2}),
        fingerprint=f"stage {number}",
        choices={},
        descriptions={},
        rows=(),
        seconds=0.004,
        bound=0.004,
        peak_bytes=peak_bytes,
        traffic={},
        solver="by hand",
        memory=MemoryUse({"parameters": peak_bytes - working, "working set": working}),
    )


def pipeline(schedule: Schedule, seconds: StageSeconds | None = None, **values: Any) -> PipelinePlan:
    """A plan of equal stages of two blocks each, on a mesh with tp=2."""
    each = seconds or StageSeconds(0.001, 0.001, 0.001, once=0.0005)
    blocks = [(f"layers.{2 * n}", f"layers.{2 * n + 1}") for n in range(schedule.num_stages)]
    return PipelinePlan(
        mesh=Mesh({"pp": schedule.num_ranks, "tp": 2}),
        axis="pp",
        schedule=schedule,
        stages=tuple(StagePlan(n, blocks[n], stage_plan(n), each) for n in range(schedule.num_stages)),
        starts=tuple(2 * n for n in range(schedule.num_stages)),
        timeline=simulate(schedule, [each] * schedule.num_stages),
        **values,
    )


SCHEDULES = [
    Schedule("gpipe", 2, 4),
    Schedule("1f1b", 4, 8),
    Schedule("interleaved_1f1b", 2, 4, 2),
    Schedule("interleaved_zero_bubble", 2, 4, 2),
    Schedule("zbv", 2, 6, 2),
    Schedule("dualpipev", 2, 8, 2),
    Schedule("pipedream", 2, 4),
]


def test_the_step_and_its_bubble_are_those_of_the_schedule() -> None:
    plan = pipeline(Schedule("1f1b", 4, 8), StageSeconds(0.001, 0.001, 0.001))
    assert plan.seconds == pytest.approx((8 + 3) * 0.003)
    assert plan.bubble == pytest.approx(3 / 11) and plan.microbatches == 8


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_ranks_idle_for_the_bubble_on_average(schedule: Schedule) -> None:
    plan = pipeline(schedule)
    idle = [plan.idle(rank) for rank in range(schedule.num_ranks)]
    assert sum(idle) / len(idle) == pytest.approx(plan.bubble)


def test_what_stages_hold_while_they_run_counts_once_on_a_rank() -> None:
    plan = pipeline(Schedule("interleaved_1f1b", 2, 4, 2))
    stages = list(plan.stages)
    stages[2] = replace(stages[2], plan=stage_plan(2, 2000, 500))
    plan = replace(plan, stages=tuple(stages))
    assert plan.rank_bytes(1) == 600 + 600 + 300
    assert plan.rank_bytes(0) == plan.peak_bytes == 600 + 1500 + 500


def test_the_table_has_a_line_per_stage_and_adds_nothing_up_wrongly() -> None:
    text = str(pipeline(Schedule("interleaved_1f1b", 2, 4, 2), memory_limit=8000, notes=("said by hand",)))
    assert "pipeline plan for the mesh pp=2 × tp=2 (4 devices, hardware cpu)" in text
    assert "interleaved_1f1b, m = 4 micro-batches, 4 stages on 2 ranks of axis pp, 2 on each" in text
    assert "1.50 kB per device at the peak, on rank 0, limit 8.00 kB" in text
    lines = [line.split() for line in text.splitlines() if "layers." in line]
    assert [line[:2] for line in lines] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert lines[1][2:] == [
        "layers.2", "…", "layers.3", "(2)", "1.00", "ms", "2.00", "ms", "500.0", "µs", "900", "B", *lines[1][-2:],
    ]  # fmt: skip
    assert "note: said by hand" in text and "print(plan.stages[0].plan)" in text


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_plan_is_saved_and_loaded_whole(schedule: Schedule, tmp_path: Path) -> None:
    plan = pipeline(schedule, memory_limit=8000, notes=("said by hand",))
    plan.save(tmp_path / "plan.json")
    assert PipelinePlan.load(tmp_path / "plan.json") == plan
    assert plan.to_json() == PipelinePlan.from_json(plan.to_json()).to_json()


def _changed(**changes: Any) -> str:
    return json.dumps({**json.loads(pipeline(Schedule("gpipe", 2, 4)).to_json()), **changes})


LONG = {"name": "gpipe", "num_ranks": 2, "num_microbatches": 2 * 10**9, "chunks": 1}
STAGE = json.loads(_changed())["stages"][0]
HUGE = {**STAGE["plan"]["reserved"], "allocator_factor": 1e18}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no plan", "the text is no JSON"),
        ("[]", "not a pipeline plan of format 1"),
        (_changed(**{"pipeline format": 7}), "not a pipeline plan of format 1"),
        (
            _changed(starts=None),
            "starts is None; needed a list of 0 to 1000000 values; give what PipelinePlan.save wrote",
        ),
        (_changed(axis="dp"), "no axis 'dp'"),
        (_changed(stages=[]), "stages \\[\\] of 2"),
        (_changed(mesh={"axes": {"pp": 3}, "hardware": "cpu"}), "the axis has 3 ranks, the schedule 2"),
        (_changed(schedule={"name": "gpipe"}), "schedule lacks 'num_ranks'"),
        (_changed(starts=[0, 0]), r"starts is \[0, 0\]; needed 2 growing numbers"),
        (_changed(schedule=LONG), "2000000000 micro-batches for 2 stages; together they may be 1000000"),
        (_changed(stages=[{**STAGE, "seconds": {}}] * 2), r"stages\[0\]\.seconds lacks 'forward'"),
        (_changed(stages=[{**STAGE, "plan": {**STAGE["plan"], "seconds": "1"}}]), r"stages\[0\]\.plan\.seconds is '1'"),
        (
            _changed(stages=[{**STAGE, "plan": {**STAGE["plan"], "reserved": HUGE}}] * 2),
            "the most bytes of a device that a file can state",
        ),
        (stage_plan(0).to_json(), "read it with Plan.load"),
    ],
)
def test_what_is_no_pipeline_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PipelinePlan.from_json(text)


@settings(max_examples=60, deadline=timedelta(seconds=5))
@given(st.randoms(use_true_random=False))
def test_a_plan_that_was_damaged_is_refused_or_can_be_printed(source: random.Random) -> None:
    try:
        plan = PipelinePlan.from_json(json.dumps(mutated(json.loads(_changed()), source)))
    except PlanError:
        return
    assert PipelinePlan.from_json(plan.to_json()) == plan and str(plan)


def test_a_pipeline_plan_is_no_plan() -> None:
    with pytest.raises(PlanError, match="read it with PipelinePlan"):
        Plan.from_json(pipeline(Schedule("gpipe", 2, 4)).to_json())


def test_the_seconds_of_a_stage_are_those_of_its_plan() -> None:
    in_turns = replace(load("h100"), launch_s=0.0, op_latency_s=0.0, communication_share=1.0)
    space = space_of(Attention(False), (IDS_BS,), in_turns, dp=2, tp=2)
    plan, _ = make_plan(space, {}, microbatches=Microbatches(4, 2))
    found, parts = stage_seconds(plan, Send(0.1), Send(0.2)), step_parts(plan)
    assert found.forward == pytest.approx(parts.forward, rel=1e-3)
    assert found.reductions > 0 and found.once + found.reductions == pytest.approx(parts.once)
    assert found.backward_input + found.backward_weight == pytest.approx(parts.backward, rel=1e-3)
    assert (found.send_forward, found.send_backward) == pytest.approx((0.1, 0.2))
    linear = next(row for row in plan.rows if row.operation == "linear" and row.module == "out")
    assert found.backward_weight >= linear.forward_seconds  # half of what its backward takes
    assert found.backward_weight < found.backward_input + found.backward_weight


def test_a_bias_takes_nothing_of_the_seconds_in_which_gradients_of_weights_are_made() -> None:
    found = []
    for bias in (False, True):
        space = space_of(TwoLinears(bias), (torch.zeros(4, 8),), load("h100"), dp=2)
        context = context_of(make_plan(space, {})[0])
        found.append(weight_seconds(context.memory_model, context.choices))
    assert 0 < found[1] == pytest.approx(found[0], rel=0.05)


def test_gradients_are_reduced_next_to_the_last_backward_of_a_stage() -> None:
    overlapped = replace(load("h100"), communication_share=0.0, launch_s=0.0)
    inputs = (torch.zeros(64, WIDTH),)
    plan = autopar.plan(Stack(), Mesh({"dp": 2}), inputs, hardware=overlapped, strategy="zero1", microbatches=4)
    found, context = stage_seconds(plan), context_of(plan)
    summed = reduction_seconds(context.memory_model, context.choices)
    assert summed > 0 and found.once == pytest.approx(step_parts(plan).once - summed)
    assert 0 < found.reducing < found.reductions and found.last_backward == 0
    assert found.reducing < stage_seconds(plan, halves=True).reducing < found.reductions


def test_a_plan_without_seconds_of_reductions_is_read() -> None:
    values = json.loads(pipeline(Schedule("gpipe", 2, 4)).to_json())
    for stage in values["stages"]:
        for name in REDUCING:
            del stage["seconds"][name]
    assert PipelinePlan.from_json(json.dumps(values)) == pipeline(Schedule("gpipe", 2, 4))


def test_the_parts_of_a_loaded_plan_are_not_known() -> None:
    with pytest.raises(PlanError, match="a plan that was loaded does not bring it along"):
        step_parts(stage_plan(0))
