"""The step of a plan as a timeline, and where that and the solver's sum differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.costs.plans.plan import Plan
from autopar.costs.steps.host_copies import DOWN, UP
from autopar.costs.steps.step import step_timeline
from autopar.costs.timeline import values
from autopar.costs.timeline.values import Timeline
from autopar.planning.settings import context_of
from autopar.views.inspection.breakdown import (
    COMPUTE,
    HOST_COPIES,
    LAUNCHES,
    LOCAL,
    OPTIMIZER,
    RECOMPUTATION,
    breakdown,
)

_PARTS = {"recomputation": RECOMPUTATION, "optimizer": OPTIMIZER}


def timeline(plan: Plan) -> Timeline:
    """Return the simulated step of a plan; PlanError where it was loaded."""
    context = context_of(plan, "timeline")
    return step_timeline(context.memory_model, context.choices, plan.recompute)


def parts(found: Timeline) -> dict[str, float]:
    """Return a timeline's seconds by part, under the names of `breakdown`.

    A collective counts the seconds that compute waits for it, and the lateness of hosts, which launches then lack.
    """
    seconds: dict[str, float] = defaultdict(float)
    for each in found.events:
        if each.task.name in (DOWN, UP) and each.task.phase != "optimizer":
            seconds[HOST_COPIES] += each.waited if each.task.overlapped else each.task.seconds
        elif each.task.stream == values.COMPUTE:
            seconds[_PARTS.get(each.task.phase, COMPUTE)] += each.task.seconds
        elif each.task.overlapped:
            seconds[_PARTS[each.task.phase]] += each.waited
        else:
            seconds[f"{each.task.name} {each.task.axis}"] += each.waited + each.task.late
    seconds[LAUNCHES] = found.launching - found.lateness
    return dict(seconds)


def compared_with_the_sum(plan: Plan, found: Timeline) -> Mapping[str, float]:
    """Return how much more (below zero: less) of each part a timeline takes than the plan's sum, largest first."""
    ours = parts(found)
    theirs = {name: share.seconds for name, share in breakdown(plan).items() if name != LOCAL}
    deltas = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in dict.fromkeys((*ours, *theirs))}
    return dict(sorted(deltas.items(), key=lambda each: -abs(each[1])))
