"""The step of a plan's rows, one thing after the other: of a plan that was loaded, which has no timeline.

Forward, then backward in reverse (each segment that is computed again ahead of its backward), then the optimizer.
Collectives hidden behind compute have no seconds in a row. All seconds add up to `plan.seconds`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.costs.plans.decision_rows import Moved, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.costs.timeline.simulation import simulate
from autopar.costs.timeline.values import COMPUTE, Task, Timeline
from autopar.errors import PlanError

ROUNDING = 1e-9
"""Sums of floats may differ by so much of their size."""


def in_turns(plan: Plan) -> Timeline:
    """Return the step of a plan's rows, one thing after the other; PlanError where the parts of a row take longer than
    it.
    """
    rests = {row.name: _other_seconds(row) for row in plan.rows}
    rows = _in_order([row for row in plan.rows if row.kind != "parameter"])
    tasks = [*_forward(rows, rests), *_backward(rows)]
    for row in plan.rows:
        if row.kind == "parameter":
            tasks += [replace(each, phase="optimizer") for each in _moves(row, row.transfers)]
            computed = row.forward_seconds + row.backward_seconds + row.recompute_seconds
            tasks += [_computed(row, "optimizer", computed)]
            tasks += [Task("optimizer", COMPUTE, rests[row.name], "optimizer", row=row.name)]
    if plan.host_seconds > 0:
        tasks.append(Task("launches", COMPUTE, plan.host_seconds, "rest"))
    left = plan.seconds - sum(task.seconds for task in tasks)
    if left > ROUNDING * plan.seconds:
        tasks.append(Task("not in any row", COMPUTE, left, "rest"))
    return simulate([replace(task, after=(number - 1,) if number else ()) for number, task in enumerate(tasks)])


def _forward(rows: Sequence[PlanRow], rests: dict[str, float]) -> list[Task]:
    """Return each call behind its inputs' moves; the rest of a row's cost stands with its forward."""
    found: list[Task] = []
    for row in rows:
        found += _moves(row, (each for each in row.transfers if not each.backward))
        found.append(Task(f"{row.operation}: local moves", COMPUTE, rests[row.name], "rest", row=row.name))
        found.append(_computed(row, "forward", row.forward_seconds))
    return found


def _backward(rows: Sequence[PlanRow]) -> list[Task]:
    """Return the calls in reverse; a segment is recomputed, in its order, ahead of its first backward."""
    found: list[Task] = []
    segments: dict[str, list[PlanRow]] = defaultdict(list)
    for row in rows:
        segments[row.segment or row.name].append(row)
    for row in reversed(rows):
        again = segments.pop(row.segment or row.name, ())
        found += [_computed(each, "recomputation", each.recompute_seconds) for each in again]
        found.append(_computed(row, "backward", row.backward_seconds))
        found += _moves(row, (each for each in row.transfers if each.backward))
    return found


def _computed(row: PlanRow, phase: str, seconds: float) -> Task:
    return Task(row.operation, COMPUTE, seconds, phase, row=row.name)


def _moves(row: PlanRow, moved: Iterable[Moved]) -> list[Task]:
    return [
        Task(
            *(each.collective, each.axis, each.seconds, "backward" if each.backward else "forward"),
            axis=each.axis,
            num_bytes=each.num_bytes,
            row=row.name,
        )
        for each in moved
    ]


def _in_order(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows as they run: a shared reshard, "linear_3/hub", follows the call that made its tensor."""
    position = {row.name: number for number, row in enumerate(rows)}
    return sorted(rows, key=lambda row: position.get(row.name.split("/")[0], position[row.name]))


def _other_seconds(row: PlanRow) -> float:
    """Return the seconds of a row that none of its parts has: the copies of reshards, and the optimizer of a
    parameter.
    """
    parts = row.forward_seconds + row.backward_seconds + row.recompute_seconds
    parts += sum(moved.seconds for moved in row.transfers)
    if parts - row.seconds > ROUNDING * max(parts, 1e-6):
        raise PlanError(
            f"{row.name} takes {row.seconds} seconds and its parts take {parts}; a row takes at least what its parts "
            "take: give a plan as autopar.plan made it."
        )
    return max(row.seconds - parts, 0.0)
