"""Check what a plan claims without solving: everything that follows from its choices, and the proof of its bound.

Rows, traffic, seconds and memory are computed again from the rules and the hardware. The bound is proven again at the
stored price of memory λ ≥ 0, in seconds per byte, by one elimination:

    L(λ) = min over all choices of (seconds + λ · bytes) - λ · limit  ≤  seconds of every choice within the limit

Where a search closed the last gap, L(λ) lies a little below the plan's bound; that rest is reported, not re-proven. So
it is for a plan that was loaded with a memory limit: at which moments memory was short is not saved, and λ is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from autopar.console.units import format_seconds
from autopar.costs.plans.answers import Verification
from autopar.costs.plans.decision_rows import KeptWhole, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.errors import PlanError
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.record import choices_of, is_offered, written_down
from autopar.planning.record import evaluate as seconds_of
from autopar.planning.settings import PlanContext, context_of
from autopar.planning.step_seconds import step_seconds_of
from autopar.solver.oracles import lower_bound
from autopar.solver.problem import Problem

TOLERANCE = 1e-9  # relative difference of seconds that are summed in another order
DERIVED = (
    "mesh",
    "host_seconds",
    "fingerprint",
    "traffic",
    "unruled",
    "kept_whole",
    "memory",
    "offload",
    "host",
    "rows",
)
"""Fields of a plan that follow from its choices."""


def verify(plan: Plan) -> Verification:
    """Check a plan against the space it was made in; PlanError with all claims that do not hold.

    A narrowed space has tables of moves already. It lacks strategies that pins exclude, which only a plan that was
    changed may choose.
    """
    context = context_of(plan, "verify")
    found = check(plan, context if is_offered(plan, context.space) else context.widened())
    if not found.ok:
        raise PlanError(f"{found}. Plan again, or load a plan that was not changed.")
    return found


def check(plan: Plan, context: PlanContext) -> Verification:
    """Return the verification of a plan without raising for false claims; raise PlanError for another model's plan."""
    choices = choices_of(plan, context.space)
    context = replace(context, memory_model=context.memory_model.fetching_ahead(plan.prefetch))
    modes = {name: mode for name, mode in plan.recompute.items() if name in context.memory_model.lifetimes.segments}
    seconds = seconds_of(context.space, choices) + _recomputation(context, choices, modes)
    proven = _lower_bound(plan, context.problem)
    microbatches = context.memory_model.microbatches
    if microbatches.several:  # the problem counts what is done once a step in part
        share = step_seconds_of(context.memory_model, choices, modes).per_microbatch(microbatches.count)
        proven += seconds - share
    again = written_down(
        replace(context, choices=choices),
        Answer(choices, modes, seconds, proven, plan.solver, plan.multiplier, context.problem),
    )
    problems = (
        *_against_pins(plan, context, choices),
        *_differences(plan, again),
        *_bounds(plan, context.problem, again.seconds, again.bound),
    )
    unproven = plan.bound - again.bound
    rest = unproven if unproven > TOLERANCE * abs(again.seconds) else 0.0
    return Verification(again.seconds, min(again.bound, again.seconds), again.peak_bytes, rest, tuple(problems))


def _recomputation(context: PlanContext, choices: tuple[int, ...], modes: Mapping[str, str]) -> float:
    """Return the seconds of everything that runs again in the backward, or is copied to the host and back."""
    model = context.memory_model
    again, space = model.backward_seconds_at, model.space
    total = sum(again(edge, choices, modes) for edge in space.edges)
    for number in range(len(choices)):
        total += again(number, choices, modes) * space.share(space.rows.get(number), choices)
    return total


def _against_pins(plan: Plan, context: PlanContext, choices: tuple[int, ...]) -> Iterator[str]:
    for number, mask in context.pins.items():
        if not mask[choices[number]]:
            name = context.space.decisions[number].name
            yield f'{name} is "{plan.choices[name]}", which its annotations rule out'


def _differences(plan: Plan, again: Plan) -> Iterator[str]:
    """Yield claims that do not follow from the choices."""
    if not _are_close(plan.seconds, again.seconds):
        yield f"it says {format_seconds(plan.seconds)}, its choices take {format_seconds(again.seconds)}"
    if plan.peak_bytes != again.peak_bytes:
        yield f"it says {plan.peak_bytes} bytes per device, its choices take {again.peak_bytes}"
    if plan.memory_limit is not None and again.reserved_bytes > plan.memory_limit:
        yield f"its choices take {again.reserved_bytes} bytes per device, its limit is {plan.memory_limit}"
    for name in DERIVED:
        claimed, derived = getattr(plan, name), getattr(again, name)
        if not _is_equal(claimed, derived):
            yield f"its {name} {'are' if name in ('rows', 'kept_whole') else 'is'} not what its choices come to"
    strangers = sorted(set(plan.recompute) - set(again.recompute))
    if strangers:
        yield f"it computes {', '.join(strangers[:3])} again, which this model has no layer for"


def _bounds(plan: Plan, problem: Problem, seconds: float, proven: float) -> Iterator[str]:
    margin = TOLERANCE * abs(seconds)
    limited = plan.memory_limit is not None and problem.budget is not None
    exact = plan.solver == "elimination" or (plan.solver == "multiplier" and limited)
    if plan.bound > seconds + margin:
        yield f"its bound, {format_seconds(plan.bound)}, lies above its seconds, {format_seconds(seconds)}"
    elif proven > seconds + margin:
        least = format_seconds(proven)
        yield f"it takes {format_seconds(seconds)}, and what keeps to its pins and limit at least {least}"
    elif plan.bound > proven + margin and exact:
        yield f"it says no plan takes less than {format_seconds(plan.bound)}, proven are {format_seconds(proven)}"


def _lower_bound(plan: Plan, problem: Problem) -> float:
    """Return L(λ) at the plan's multiplier; 0 if the treewidth is too high for elimination."""
    return max(lower_bound(problem, max(plan.multiplier, 0.0)), 0.0)


def _is_equal(claimed: Any, derived: Any) -> bool:
    """Compare plain values, floats up to rounding."""
    if isinstance(claimed, float) and isinstance(derived, float):
        return _are_close(claimed, derived)
    if isinstance(claimed, tuple) and isinstance(derived, tuple):
        return len(claimed) == len(derived) and all(map(_is_equal, claimed, derived))
    if isinstance(claimed, PlanRow | KeptWhole) and type(claimed) is type(derived):
        return all(
            _is_equal(getattr(claimed, each.name), getattr(derived, each.name))
            for each in fields(claimed)
            if each.compare
        )
    return claimed == derived


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-15)
