"""The predicted step as a trace: nothing is lost, and on a track nothing overlaps."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.costs.plans.decision_rows import Instant, MemoryUse, Moved, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.errors import PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import language_model
from autopar.views.report.trace import trace

GATHER = Moved("all_gather", "tp", 100, 0.25)
REDUCE = Moved("all_reduce", "dp", 8, 0.5, backward=True)


def _row(name: str, seconds: float, kind: str = "call", **values: Any) -> PlanRow:
    given = {"transfers": (), **values}
    return PlanRow(name, kind, "up", "linear", ("data", "row"), "S(0) I", seconds, **given)


def _plan(*rows: PlanRow, seconds: float | None = None, **values: Any) -> Plan:
    whole = sum(row.seconds for row in rows) if seconds is None else seconds
    return Plan(Mesh({"dp": 2, "tp": 2}), "", {}, {}, rows, whole, whole, 0, {}, "by hand", **values)


def _events(plan: Plan, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace(plan))["traceEvents"] if event["ph"] == phase]


def _slices(plan: Plan) -> list[tuple[str, str, int, float, float]]:
    return [(e["name"], e["cat"], e["tid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in _events(plan, "X")]


@pytest.fixture(scope="module")
def model_plan() -> Plan:
    ids_BS = torch.zeros(8, 32, dtype=torch.int64)
    model = language_model("demo", 2, device="meta")
    return autopar.plan(model, Mesh({"dp": 2, "tp": 2}, hardware="cpu"), (ids_BS, ids_BS))


@pytest.mark.slow
def test_the_slices_of_a_model_are_the_events_of_its_timeline(model_plan: Plan, tmp_path: Path) -> None:
    model_plan.to_trace(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    slices = [event for event in written["traceEvents"] if event["ph"] == "X"]
    timeline = model_plan.timeline()
    events = [each for each in timeline.events if each.end > each.start]
    assert sorted((e["name"], round(e["ts"], 3)) for e in slices) == sorted(
        (each.task.name, round(1e6 * each.start, 3)) for each in events
    )
    assert max(e["ts"] + e["dur"] for e in slices) / 1e6 == pytest.approx(timeline.seconds, rel=1e-6)
    assert written["otherData"]["timeline seconds"] == timeline.seconds
    assert written["otherData"]["predicted seconds"] == model_plan.seconds


def test_the_slices_of_a_loaded_plan_follow_each_other_and_add_up_to_its_seconds(model_plan: Plan) -> None:
    slices = _events(Plan.from_json(model_plan.to_json()), "X")
    assert sum(event["dur"] for event in slices) / 1e6 == pytest.approx(model_plan.seconds, rel=1e-6)
    assert not [event for event in slices if event["name"] == "not in any row"]
    assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-6 for one, other in pairwise(slices))


def test_time_goes_on_and_no_slice_of_a_track_lies_over_another(model_plan: Plan) -> None:
    events = [event for event in json.loads(trace(model_plan))["traceEvents"] if event["ph"] != "M"]
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(events))
    tracks = defaultdict(list)
    for event in _events(model_plan, "X"):
        tracks[event["tid"]].append(event)
    assert len(tracks) > 1
    for slices in tracks.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-6 for one, other in pairwise(slices))


def test_live_memory_of_a_model_is_a_counter(model_plan: Plan) -> None:
    assert model_plan.memory is not None
    counted = [event["args"]["bytes"] for event in _events(model_plan, "C")]
    assert max(counted) == max(each.num_bytes for each in model_plan.memory.timeline)


def test_memory_is_counted_where_its_row_runs() -> None:
    memory = MemoryUse({}, (Instant("b", False, 7), Instant("b", True, 9)))
    rows = (_row("a", 1.0, forward_seconds=1.0), _row("b", 1.0, forward_seconds=1.0))
    counted = [(e["ts"] / 1e6, e["args"]["bytes"]) for e in _events(_plan(*rows, memory=memory), "C")]
    assert counted == [(1.0, 7), (2.0, 9)]
    assert not _events(_plan(*rows), "C")


def test_the_forward_comes_first_and_the_backward_is_reversed() -> None:
    one = _row("a", 3.75, forward_seconds=1.0, backward_seconds=2.0, transfers=(GATHER, REDUCE))
    other = _row("b", 3.0, forward_seconds=1.0, backward_seconds=2.0)
    shared_reshard = _row("a/reshard", 0.5, kind="shared_reshard", transfers=(REDUCE,))
    assert _slices(_plan(_row("p", 4.0, kind="parameter"), one, other, shared_reshard)) == [
        ("all_gather", "forward", 2, 0.0, 0.25),
        ("linear", "forward", 0, 0.25, 1.0),
        ("linear", "forward", 0, 1.25, 1.0),
        ("linear", "backward", 0, 2.25, 2.0),
        ("all_reduce", "backward", 1, 4.25, 0.5),
        ("linear", "backward", 0, 4.75, 2.0),
        ("all_reduce", "backward", 1, 6.75, 0.5),
        ("optimizer", "optimizer", 0, 7.25, 4.0),
    ]


def test_a_segment_is_computed_again_ahead_of_its_backward() -> None:
    parts = {"forward_seconds": 1.0, "backward_seconds": 2.0, "recompute_seconds": 1.0, "segment": "layers.0"}
    slices = _events(_plan(_row("a", 4.0, **parts), _row("b", 4.0, **parts)), "X")
    assert [(event["cat"], event["args"]["row"]) for event in slices][2:] == [
        ("recomputation", "a"),
        ("recomputation", "b"),
        ("backward", "b"),
        ("backward", "a"),
    ]


def test_what_no_part_of_a_row_takes_is_a_slice_of_its_own() -> None:
    assert _slices(_plan(_row("a", 0.75, transfers=(GATHER,)), seconds=1.0))[1:] == [
        ("linear: local moves", "rest", 0, 0.25, 0.5),
        ("not in any row", "rest", 0, 0.75, 0.25),
    ]


def test_a_row_that_takes_less_than_its_parts_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a takes 1\.0 seconds and its parts take 2\.0"):
        trace(_plan(_row("a", 1.0, forward_seconds=2.0)))
