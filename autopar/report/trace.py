"""The predicted step as a trace that Perfetto and chrome://tracing open.

One process with a track for compute and one per mesh axis, or joined ones, for communication. The prediction is a
sum, so the slices follow each other: what is hidden behind compute has no seconds in a plan and no slice here. The step
runs the calls forward, then backward in reverse (each segment that is computed again ahead of its backward), then the
optimizer. The durations of all slices add up to `plan.seconds`.

Format: Trace Event Format, "X" for slices, "C" for the counter, "M" for names; times in microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import PlanError
from autopar.plans.plan import Plan
from autopar.plans.rows import Moved, PlanRow

PROCESS = 1
COMPUTE_TRACK = 0
MICROSECONDS = 1e6
ROUNDING = 1e-9
"""Sums of floats may differ by so much of their size."""

Event = dict[str, Any]


@dataclass(slots=True)
class _Clock:
    """Slices written one after another; `now` is in microseconds."""

    tracks: dict[str, int]
    instants: dict[tuple[str, bool], int]
    now: float = 0.0
    events: list[Event] = field(default_factory=list)

    def slice(self, name: str, category: str, track: int, seconds: float, **args: Any) -> None:
        """A slice from now on; none where it takes no time."""
        if seconds <= 0:
            return
        duration = seconds * MICROSECONDS
        self._add(ph="X", name=name, cat=category, tid=track, ts=self.now, dur=duration, args=args)
        self.now += duration

    def compute(self, row: PlanRow, category: str, seconds: float) -> None:
        """A slice of what a row computes."""
        self.slice(row.operation, category, COMPUTE_TRACK, seconds, module=row.module, **_choice(row))

    def moves(self, row: PlanRow, moved: Iterable[Moved]) -> None:
        """A slice per collective of a row, on the track of its axis."""
        for each in moved:
            track = self.tracks.setdefault(each.axis, len(self.tracks) + 1)
            args = {"module": row.module, "collective": each.collective, "axis": each.axis, "bytes": each.num_bytes}
            category = "backward" if each.backward else "forward"
            self.slice(each.collective, category, track, each.seconds, **args, **_choice(row))

    def memory(self, row: PlanRow, backward: bool) -> None:
        """The live bytes while a row runs, where the plan knows them."""
        num_bytes = self.instants.get((row.name, backward))
        if num_bytes is not None:
            self._add(ph="C", name="live memory", ts=self.now, args={"bytes": num_bytes})

    def _add(self, **event: Any) -> None:
        self.events.append({"pid": PROCESS, **event})


def trace(plan: Plan) -> str:
    """The trace as JSON text. Raises PlanError where the parts of a row take longer than the row."""
    timeline = plan.memory.timeline if plan.memory else ()
    instants = {(each.name, each.backward): each.num_bytes for each in timeline}
    clock = _Clock({name: number for number, name in enumerate(plan.mesh.names, 1)}, instants)
    rests = {row.name: _rest(row) for row in plan.rows}
    parameters = [row for row in plan.rows if row.kind == "parameter"]
    rows = _in_order([row for row in plan.rows if row.kind != "parameter"])
    _forward(clock, rows, rests)
    _backward(clock, rows)
    for row in parameters:
        clock.moves(row, row.transfers)
        clock.compute(row, "optimizer", row.forward_seconds + row.backward_seconds + row.recompute_seconds)
        clock.slice("optimizer", "optimizer", COMPUTE_TRACK, rests[row.name], parameter=row.module, **_choice(row))
    left = plan.seconds - clock.now / MICROSECONDS
    if left > ROUNDING * plan.seconds:
        clock.slice("not in any row", "rest", COMPUTE_TRACK, left)
    about = {"mesh": str(plan.mesh), "hardware": plan.mesh.hardware, "predicted seconds": plan.seconds}
    events = [*_names(clock.tracks), *clock.events]
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, separators=(",", ":"))


def _forward(clock: _Clock, rows: Sequence[PlanRow], rests: dict[str, float]) -> None:
    """Each call behind what is moved for it; what a row costs beside its parts stands with its forward."""
    for row in rows:
        clock.memory(row, backward=False)
        clock.moves(row, (each for each in row.transfers if not each.backward))
        args = {"module": row.module, **_choice(row)}
        clock.slice(f"{row.operation}: local moves", "rest", COMPUTE_TRACK, rests[row.name], **args)
        clock.compute(row, "forward", row.forward_seconds)


def _backward(clock: _Clock, rows: Sequence[PlanRow]) -> None:
    """Calls in reverse; a segment is computed again, in its order, ahead of its first backward."""
    segments: dict[str, list[PlanRow]] = defaultdict(list)
    for row in rows:
        segments[row.segment or row.name].append(row)
    for row in reversed(rows):
        clock.memory(row, backward=True)
        for again in segments.pop(row.segment or row.name, ()):
            clock.compute(again, "recomputation", again.recompute_seconds)
        clock.compute(row, "backward", row.backward_seconds)
        clock.moves(row, (each for each in row.transfers if each.backward))


def _in_order(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """The rows as they run: a hub, "linear_3/hub", stands behind the call that made its tensor."""
    position = {row.name: number for number, row in enumerate(rows)}
    return sorted(rows, key=lambda row: position.get(row.name.split("/")[0], position[row.name]))


def _rest(row: PlanRow) -> float:
    """Seconds of a row that none of its parts has: the copies of reshards, and the optimizer of a parameter."""
    parts = row.forward_seconds + row.backward_seconds + row.recompute_seconds
    parts += sum(moved.seconds for moved in row.transfers)
    if parts - row.seconds > ROUNDING * max(parts, 1e-6):
        raise PlanError(
            f"{row.name} takes {row.seconds} seconds and its parts take {parts}; a row takes at least what its parts "
            "take: give a plan as autopar.plan made it."
        )
    return max(row.seconds - parts, 0.0)


def _choice(row: PlanRow) -> dict[str, str]:
    return {"row": row.name, "roles": " ".join(row.roles), "layout": row.layout}


def _names(tracks: dict[str, int]) -> list[Event]:
    """The names of the process and its tracks, in the order in which they are shown."""
    names = {COMPUTE_TRACK: "compute", **{track: f"communication on {axis}" for axis, track in tracks.items()}}
    events: list[Event] = [{"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "predicted step"}}]
    for track, name in names.items():
        events.append({"ph": "M", "pid": PROCESS, "tid": track, "name": "thread_name", "args": {"name": name}})
        events.append(
            {"ph": "M", "pid": PROCESS, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
        )
    return events
