"""The predicted step as a trace that Perfetto and chrome://tracing open.

One process with a track for what computes and one per communicator, as the plan's timeline has them. A plan that was
loaded has none: of that the slices follow each other (`in_turns`).

Format: Trace Event Format, "X" for slices, "C" for the counter, "M" for names; times in microseconds.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.costs.plans.decision_rows import PlanRow
from autopar.costs.plans.plan import Plan
from autopar.costs.timeline.values import COMPUTE, Event, Timeline
from autopar.views.report.in_turns import in_turns

PROCESS = 1
MICROSECONDS = 1e6

Written = dict[str, Any]


def trace(plan: Plan) -> str:
    """Return the trace as JSON text. Raises PlanError where the parts of a row take longer than the row."""
    timeline = in_turns(plan) if plan.context is None else plan.timeline()
    rows = {row.name: row for row in plan.rows}
    tracks = {name: number for number, name in enumerate(dict.fromkeys((COMPUTE, *plan.mesh.names, *timeline.streams)))}
    shown = [each for each in timeline.events if each.end > each.start]
    slices = [_slice(each, tracks[each.task.stream], rows) for each in shown]
    events = sorted((*_memory_events(plan, timeline), *slices), key=lambda each: each["ts"])
    about = {
        "mesh": str(plan.mesh),
        "hardware": plan.mesh.hardware,
        "predicted seconds": plan.seconds,
        "timeline seconds": timeline.seconds,
    }
    overlapped = {each.task.stream for each in timeline.events if each.task.overlapped}
    every = [*_track_names(tracks, overlapped), *events]
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": every}, separators=(",", ":"))


def _slice(event: Event, track: int, rows: dict[str, PlanRow]) -> Written:
    task, row = event.task, rows.get(event.task.row)
    args: dict[str, Any] = (
        {"module": row.module, "row": row.name, "roles": " ".join(row.roles), "layout": row.layout}
        if row
        else {"weights of": task.row}
    )
    if task.axis:
        args |= {"collective": task.name, "axis": task.axis, "bytes": task.num_bytes, "waited us": event.waited * 1e6}
    if task.overlapped:
        args |= {"waited us": event.waited * 1e6}
    return _event(
        *("X", task.name, event.start),
        *(("cat", task.phase), ("tid", track), ("dur", (event.end - event.start) * MICROSECONDS), ("args", args)),
    )


def _event(kind: str, name: str, start: float, *others: tuple[str, Any]) -> Written:
    return {"pid": PROCESS, "ph": kind, "name": name, "ts": start * MICROSECONDS, **dict(others)}


def _memory_events(plan: Plan, timeline: Timeline) -> list[Written]:
    """Return the live bytes while a row runs, where the plan knows them."""
    starts: dict[tuple[str, bool], float] = {}
    for each in timeline.events:
        if each.task.phase in ("forward", "rest", "backward"):
            starts.setdefault((each.task.row, each.task.phase == "backward"), each.start)
    instants = plan.memory.timeline if plan.memory else ()
    return [
        _event("C", "live memory", starts[each.name, each.backward], ("args", {"bytes": each.num_bytes}))
        for each in instants
        if (each.name, each.backward) in starts
    ]


def _track_names(tracks: dict[str, int], overlapped: set[str]) -> list[Written]:
    """Return the names of the process and its tracks, in the order in which they are shown."""
    events: list[Written] = [{"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "predicted step"}}]
    for stream, track in tracks.items():
        name = stream if stream == COMPUTE or stream in overlapped else f"communication on {stream}"
        events.append({"ph": "M", "pid": PROCESS, "tid": track, "name": "thread_name", "args": {"name": name}})
        events.append(
            {"ph": "M", "pid": PROCESS, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
        )
    return events
