"""The predicted step of a pipeline as JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.simulation import Slice

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradient of the input",
    "W": "backward, gradient of the weights",
    "once": "once a step",
}
TRACE_COLOURS = {"F": "rail_response", "B": "rail_animation", "I": "good", "W": "yellow", "once": "grey"}
"""Names of colours that chrome://tracing has."""
PROCESS = 1
MICROSECONDS = 1e6
Event = dict[str, Any]


def trace(plan: PipelinePlan) -> str:
    """Return the predicted step as JSON text that Perfetto and chrome://tracing open."""
    events: list[Event] = [{"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "predicted step"}}]
    for rank in range(plan.schedule.num_ranks):
        stages = ", ".join(str(stage) for stage in plan.schedule.stages_of(rank))
        name = {"name": f"rank {rank} (stage {stages})"}
        events.append({"ph": "M", "pid": PROCESS, "tid": rank, "name": "thread_name", "args": name})
        events.append(
            {"ph": "M", "pid": PROCESS, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}
        )
    events += [_event(plan, each) for each in plan.timeline.slices if each.end > each.start]
    about = {
        "mesh": str(plan.mesh),
        "hardware": plan.mesh.hardware,
        "schedule": plan.schedule.name,
        "predicted seconds": plan.seconds,
        "bubble": plan.bubble,
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, separators=(",", ":"))


def _event(plan: PipelinePlan, each: Slice) -> Event:
    args = {"stage": each.stage, "microbatch": each.microbatch, "blocks": plan.stages[each.stage].range}
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": each.rank,
        "name": slice_label(each),
        "cat": KINDS[each.kind],
        "cname": TRACE_COLOURS[each.kind],
        "ts": each.start * MICROSECONDS,
        "dur": (each.end - each.start) * MICROSECONDS,
        "args": args,
    }


def slice_label(each: Slice) -> str:
    return each.kind if each.microbatch is None else f"{each.kind}{each.microbatch}"
