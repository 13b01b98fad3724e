"""The best plan whose memory is within a limit at every moment of a step.

The best without a limit comes first, and is the answer if it fits. The bytes at one moment are one row of the problem.
Few moments matter, and which ones is seen from choices: a search (`solver.search`) begins with a row where the backward
begins, the fullest moment of most plans, or where the best without a limit is the fullest. It gets further rows where
its choices exceed the limit, and where a plan that it begins at fills it (`moments`). If it ends without any choices,
the least peak of all plans says whether there are some (`least_peak`), and if not, what a plan needs at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from autopar.console.units import format_share
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import bytes_by_moment
from autopar.costs.space.narrowed import Pins
from autopar.errors import CutOffError, InfeasibleError, TimeLimitError, warn_user
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.formulation import Formulation, pinned_by
from autopar.planning.memory_limit.answers import (
    Answer,
    choices_and_modes,
    choices_of_nodes,
    row_of,
    share,
    without_idle_modes,
)
from autopar.planning.memory_limit.moments import Moments
from autopar.planning.memory_limit.refusal import Modes, Refusal
from autopar.planning.options.groups import Solver
from autopar.planning.settings import Settings
from autopar.solver.deadline import ENDING, NEVER, after, grace, is_over, seconds_until, until, why_over
from autopar.solver.ilp import solve_ilp
from autopar.solver.infeasibility import describe_conflict
from autopar.solver.problem import Problem
from autopar.solver.search import Found, RowSource, search
from autopar.solver.solve import solve
from autopar.solver.tolerances import Tolerances, without_warnings

FEW_CALLS = 256  # calls of a model whose plan is proven to the end
STOP_GAP = 1e-3  # relative optimality gap at which an expensive search stops by default
HALF = 0.5  # largest share of the time until any choices are found; the least peak takes the rest


def best_within(formulation: Formulation, pins: Pins, settings: Settings) -> Answer:
    """Return the fastest choice under pins, within the memory limit of the settings if they have one.

    Several micro-batches are as fast as one of them with its share of what a step does once.

    Without a gap the optimum is searched. For many calls a choice within a thousandth of it suffices if a smaller gap
    is expensive: if elimination takes seconds, and counts of equal parts take longer. If that is not proven, the bound
    is below the seconds, and a RuntimeWarning says so. `is_brief`: none counts long. InfeasibleError where no choice is
    within the limit, with the least that one needs, and TimeLimitError where none was found in time. With a
    cut-off (in seconds) CutOffError where memory costs time and none is found to be faster than that, or none is within
    the limit: what pays nothing for memory is an answer.
    """
    limit, options, deadline = settings.tensor_limit, settings.search, after(settings.search.time_limit)
    is_rough = options.gap is None and (settings.is_brief or len(formulation.memory.lifetimes.calls) > FEW_CALLS)
    stop_gap = STOP_GAP if is_rough else options.gap or 0.0
    counted = math.inf if settings.is_brief else stop_gap
    tolerances = Tolerances(options.gap or 0.0, stop_gap, counted, cutoff=settings.cutoff)
    refusal = Refusal(formulation, pins, deadline, (1 - ENDING) * options.time_limit, settings.is_brief)
    modes = settings.modes(formulation.memory.lifetimes.segments)
    with refusal.naming_pins():
        if limit is None or not formulation.memory.lifetimes.calls:
            return _without_a_limit(formulation, pins, modes, options.solver, options.gap or 0.0, deadline)
        found = _within(refusal, limit, modes, tolerances, options.solver)
    if share(found) > max(stop_gap, options.gap or 0.0):
        why = f"{why_over()}: " if is_over(deadline) else ""
        most = f"at most {format_share(share(found))} of its step could be saved"
        warn_user(f"{why}the plan is within the limit at every moment, but not proven best: {most}.", RuntimeWarning)
    if not modes:
        return found
    with until(NEVER):
        return without_idle_modes(found, formulation, pins, modes, limit)


def _without_a_limit(
    formulation: Formulation, pins: Pins, modes: Modes | None, solver: Solver, gap: float, deadline: float
) -> Answer:
    """Return the best without a limit; nothing is computed again that need not be."""
    forced = None if modes is None or not all(modes.values()) else modes
    cached = formulation.without_a_limit
    key = None if forced is None else tuple(forced.items()), pinned_by(pins), gap
    if key not in cached:
        problem = formulation.problem(pins, modes=forced)
        found = solve(problem, solver=solver, time_limit=max(seconds_until(deadline), grace()), gap=gap)
        choices, chosen = choices_and_modes(found.choices, formulation, forced)
        answer = Answer(choices, chosen, found.seconds, found.bound, found.solver, found.multiplier, problem)
        if is_over(deadline):
            return answer  # it may be better another time
        cached[key] = answer
    return cached[key]


def _within(refusal: Refusal, limit: int, modes: Modes | None, tolerances: Tolerances, solver: Solver) -> Answer:
    """Return the best within a limit that is found in time.

    Where nothing is known of prices, the best without a limit comes first. Its problem is smaller, without modes and
    bytes. What it takes is proven at no price of memory.
    """
    formulation, pins, deadline = refusal.formulation, refusal.pins, refusal.deadline
    gives_up = deadline - HALF * seconds_until(deadline)
    last = len(formulation.memory.lifetimes.calls) - 1
    prices = {last: 0.0}
    if (near := formulation.near) is not None and formulation.incumbent is not None:
        # Rows of several moments tell equal layers apart, and the whole is priced in many times the time.
        prices[last] = near.price * near.row.total
    elif near is not None:
        prices |= {moment: near.price * weight for moment, weight in near.row.weights}

    def state(rows: Sequence[MemoryRow]) -> Sequence[Problem]:
        return formulation.problems(pins, rows, limit, modes)

    def taken(choices: tuple[int, ...]) -> np.ndarray:
        return bytes_by_moment(formulation.memory, *choices_and_modes(choices, formulation, modes))

    moments, at_prices = Moments(state, taken, limit, list(prices)), None
    if solver != "ilp" and not any(prices.values()):
        with without_warnings(), suppress(TimeLimitError):
            free = _without_a_limit(formulation, pins, modes, solver, tolerances.expensive, gives_up)
            free = replace(free, modes=free.modes or dict.fromkeys(modes or (), MODES[0]))
            at_prices = free.bound, choices_of_nodes(free.choices, free.modes.values())
            if moments.is_within(at_prices[1]):
                return free
            if free.bound >= tolerances.cutoff:
                raise CutOffError(free.bound)
            moments.begin_with(at_prices[1])
    first = refusal.first_of(moments, limit)
    if first.forbidden_node is not None:
        raise InfeasibleError(describe_conflict(first, deadline))
    if solver == "ilp":
        found = _by_ilp(moments, deadline)
    else:
        if (known := _incumbent(formulation, moments, modes)) is not None:
            moments.fill_with(known)
        found = search(moments, deadline, tolerances, tuple(prices.values()), gives_up, known, at_prices)
    is_free = found.choices is not None and not any(found.prices)
    if not is_free and found.bound >= tolerances.cutoff < math.inf:
        raise CutOffError(found.bound)
    if found.choices is None:
        if tolerances.cutoff < math.inf:
            raise CutOffError(math.inf)
        smallest, bound = refusal.smallest_within(limit, modes), found.bound
        known = choices_of_nodes(smallest.choices, smallest.modes.values()) if smallest.peak_bytes <= limit else None
        found = search(moments, deadline, tolerances, found.prices, known=known)
        if found.choices is None:
            raise refusal.none_within(limit, modes, smallest)
        found = replace(found, bound=min(max(found.bound, bound, 0.0), found.seconds))
    row = row_of(dict(zip(moments.numbers, found.prices, strict=False)))
    row, multiplier = (row, sum(found.prices) / row.total) if row.weights else (None, 0.0)
    assert found.choices is not None
    choices, chosen = choices_and_modes(found.choices, formulation, modes)
    with until(NEVER):  # the answer is found
        problem = formulation.problem(pins, row, limit, modes)
    return Answer(choices, chosen, found.seconds, found.bound, found.solver, multiplier, problem, row)


def _incumbent(formulation: Formulation, moments: Moments, modes: Modes | None) -> tuple[int, ...] | None:
    """Return the choices of the formulation's incumbent, if they are allowed and within the limit."""
    if formulation.incumbent is None:
        return None
    chosen, of_segments = formulation.incumbent
    choices = choices_of_nodes(chosen, [of_segments.get(name, MODES[0]) for name in modes or ()])
    first = moments.problems()[0]
    if any(choice >= node.num_strategies for choice, node in zip(choices, first.nodes, strict=True)):
        return None
    return choices if math.isfinite(first.seconds_of(choices)) and moments.fits(choices) else None


def _by_ilp(source: RowSource, deadline: float) -> Found:
    """Return what the plain ILP finds of the whole, the reference, with a row for each moment that it exceeds."""
    while True:
        problems = source.problems()
        result = solve_ilp(problems[0], seconds_until(deadline), rows=problems[1:])
        prices = (0.0,) * len(problems)
        if result.choices is None:
            return Found(None, math.inf, result.bound, prices, "ilp")
        if source.fits(result.choices):
            seconds = problems[0].seconds_of(result.choices)
            return Found(result.choices, seconds, min(result.bound, seconds), prices, "ilp")
        if len(source.problems()) == len(problems) or is_over(deadline):
            return Found(None, math.inf, result.bound, prices, "ilp")
