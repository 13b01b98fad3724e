"""Several memory rows at once: a price for each, and an ILP with all rows over what is left.

    L(λ) = min_x [seconds(x) + Σ_r λ_r (bytes_r(x) − budget_r)]  ≤  seconds of any x within all budgets         λ ≥ 0

1. One evaluation at prices that are nearly right bounds the problem; strategies that no choices within a margin of that
   bound take are left out (`min_marginals`), and little is left.
2. The best prices are found by cutting planes (Kelley 1960): every visited x bounds L from above, and the next
   prices lie halfway to those that are best against all of them. Where evaluations are cheap, they are looked for on
   the whole, before anything is left out. Where they take seconds, on what is left: if these prove that nothing lies
   within the margin, what is left lacks strategies that are cheap at them: they are tried on the whole, halfway, and
   strategies within a margin there are added to the rest, until the margin can contain a solution.
3. Counts of what is left, with all rows, and labels where there is too much to count, give the best within the margin
   (`remaining_choices`). Within the margin of the first step it is the best of all; else that is taken again, larger,
   at the prices found.

If the treewidth is too high for elimination, some nodes are fixed at their choices in a known solution, so that the
rest has low treewidth (`neighbourhoods`). The optimum given these nodes is nearly the global one, and so are its
prices, found by elimination. From there messages bound the whole at prices (`bounds`), which are looked for on it,
by cutting planes again, where those to begin with are not near. Unless it is large, the rest within a margin of the
bound has low treewidth, and better prices. Choices that fit are combined from parts of visited ones on both sides of
the budgets, until there are better ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.bounds.neighbourhoods import separators
from autopar.solver.bounds.prices import NEARER, OverElsewhere, best_prices, nowhere
from autopar.solver.deadline import after, is_over, seconds_until
from autopar.solver.elimination.bucket_elimination import CHEAP_WORK
from autopar.solver.elimination.min_marginals import cheapest
from autopar.solver.lagrangian import is_closed
from autopar.solver.low_treewidth import EFFORT, EXACT, Tolerances
from autopar.solver.memory_rows.best_below import Best, best_below
from autopar.solver.memory_rows.crossing import crossed
from autopar.solver.memory_rows.priced_rows import Rows, WideRows, constant_of
from autopar.solver.presolve.contraction import contract_each
from autopar.solver.presolve.reduction import prune_each, with_fixed
from autopar.solver.problem import Problem

TOLERANCE = 1e-9  # of the seconds: a smaller gap counts as none
MAX_WORK = 5_000_000_000  # entries of an elimination: more are left to other searches
FIRST_MARGIN, WIDER = 1e-3, 8.0  # of the bound: within which the best is looked for, and growth of that
EXPENSIVE_MARGIN = 3e-4  # of the bound: the first where elimination takes seconds
PRICED_WORK = 100_000_000  # entries of an elimination: prices are looked for on the whole where it has no more
REPORTED_WORK = 10_000_000  # entries of an elimination: with less a search takes no longer than to add rows
MAX_STEPS = 6  # from prices to others, within one margin
WIDE, WIDEST = 0.05, 1.0  # of the bound: margins beyond which nothing is looked for, and where a solution is known
GROWTH = 3.0  # of a margin at high treewidth
LEFT_WORK = 3 * CHEAP_WORK  # entries of an elimination of the remaining problem at high treewidth
RADIUS = 0.01  # of the bound: what a full row costs at first at most, where nothing is known of prices
LEAST_MARGIN = 1e-5  # of the bound: if the remaining problem within less has high treewidth, others solve it
PRICED_NEAR = 1e-4  # of the bound: gains by better prices at high treewidth below which the search for them ends
FIXED_BAG = 20_000  # bag entries given fixed nodes: more take longer and are hardly better
FIXED_ENTRIES = 30_000_000  # passed by messages: with fewer, messages find prices sooner than a search with fixed nodes
FIXED_NEAR = 2.5e-3  # of the seconds: gap that suffices given fixed nodes, as better choices need other fixed nodes
FIXED_EFFORT = 0.2  # CP-SAT's deterministic seconds of each count given fixed nodes
FIXED_SHARE = 0.5  # of the time, at most, for problems with fixed nodes


def solve_rows(
    problems: Sequence[Problem],
    prices: Sequence[float],
    incumbent: float,
    time_limit: float,
    gap: float = 0.0,
    tolerances: Tolerances = EXACT,
    visited: Sequence[Sequence[int]] = (),
    is_wide: bool | None = None,
    limit: float = math.inf,
    is_over_elsewhere: OverElsewhere = nowhere,
) -> Best:
    """Return the best choice per node within all budgets, or better than `incumbent` seconds.

    The problems are one with a memory row each: they differ in bytes and budgets. `prices` (in seconds per byte) are
    near those of the answer. Returns the best found by the time limit, with its bound. A gap (a share of the seconds)
    ends the search early, and so does one within `tolerances` if more evaluations or counts are expensive. `visited`
    are choices visited earlier, over the budgets or not; others may be combined from their parts. A graph that
    `is_wide` is not tried by elimination, one that is not by nothing else: with too many rows for that nothing is found
    (None: either is tried). A bound on the whole as high as the cut-off of `tolerances` ends the search. Choices of
    more than `limit` seconds are not looked for; the bound is no higher than that where they may be better than what is
    known.

    If a search takes long, the choices that (nearly) optimal prices mix are first checked against the budgets that are
    not rows of the problems. If they exceed one, the search stops: the problem needs that row. Where there is a
    cut-off, prices are first looked for to the end: they may prove as much.
    """
    deadline = after(time_limit)
    pruned = prune_each(problems)
    contracted = contract_each([each.problem for each in pruned])
    smaller = [each.problem for each in contracted]
    whole = None if is_wide else Rows.of(smaller, deadline, MAX_WORK)
    if whole is None and is_wide is False:
        return Best(None, -math.inf, tuple(prices), is_searched=False)
    allowed = [each for each in visited if problems[0].seconds_of(each) < math.inf]
    seen = [contracted[0].restrict(pruned[0].restrict(each)) for each in allowed]
    ask = _lifted_predicate(is_over_elsewhere, lambda each: pruned[0].extend(contracted[0].extend(each)))
    if whole is None:
        gap = max(gap, tolerances.expensive, TOLERANCE)
        found = _best_of_wide(smaller, tuple(prices), seen, incumbent, limit, deadline, gap, tolerances, ask)
    else:
        ask = ask if whole.elimination.work > REPORTED_WORK else nowhere
        found = _best_of_narrow(whole, tuple(prices), seen, incumbent, limit, deadline, gap, tolerances, ask)
    choices = None if found.choices is None else pruned[0].extend(contracted[0].extend(found.choices))
    if choices is not None and problems[0].seconds_of(choices) >= incumbent:
        choices = None  # what is known already: its sum in another order is less
    near = tuple([pruned[0].extend(contracted[0].extend(each)) for each in found.visited])
    return replace(found, choices=choices, visited=near)


def _best_of_narrow(
    whole: Rows,
    prices: tuple[float, ...],
    seen: Sequence[tuple[int, ...]],
    incumbent: float,
    limit: float,
    deadline: float,
    gap: float,
    tolerances: Tolerances,
    is_over_elsewhere: OverElsewhere,
) -> Best:
    """Evaluations of the whole are exact: within a margin of what one proves, little is left."""
    is_expensive = whole.elimination.work > CHEAP_WORK
    gap = max(gap, tolerances.expensive if is_expensive else 0.0, TOLERANCE)
    best, bound, share = None, -math.inf, EXPENSIVE_MARGIN if is_expensive else FIRST_MARGIN
    visited = list(seen)
    largest_seconds = (1 + TOLERANCE) * whole.problems[0].largest_seconds
    try:
        reached, _ = whole.at(prices)
        if math.isinf(reached):
            return Best(None, reached, prices)  # pairs that are allowed contradict each other
        if whole.elimination.work <= PRICED_WORK:
            soon = is_over_elsewhere if tolerances.cutoff >= sys.float_info.max else nowhere
            priced = best_prices(
                whole, prices, abs(reached), 0.0, gap, deadline, cutoff=tolerances.cutoff, is_over_elsewhere=soon
            )
            reached, prices = priced.bound, priced.prices
            if priced.seconds < incumbent:
                best, incumbent = priced.choices, priced.seconds
            if reached >= tolerances.cutoff:
                return Best(best, reached, prices, is_searched=False)
            is_open = not is_closed(incumbent, reached, gap) and not is_over(deadline)
            if priced.is_over_elsewhere or (is_open and is_over_elsewhere(priced.mixture)):
                return Best(best, reached, prices, is_searched=False, is_over_elsewhere=True)
        scale, near, steps = abs(reached), None, 0
        while True:
            bound = max(bound, reached)
            widest = math.inf if share > WIDEST else (share + TOLERANCE) * scale
            near = near or whole.reduced_costs(prices, widest)
            margin = min(widest, min(incumbent, limit) - reached + TOLERANCE * scale)
            below = reached + margin
            left = whole.left(near, margin)
            start, constant = prices, constant_of(left)
            rows, is_mixed = None if math.isinf(constant) else whole.on(left), False
            ask = _lifted_predicate(is_over_elsewhere, left[0].extend)
            if is_expensive and rows is not None:
                priced = best_prices(rows, prices, scale, constant, gap, deadline, is_over_elsewhere=ask)
                start, bound = priced.prices, max(bound, min(priced.bound + constant, below, incumbent))
                visited += [left[0].extend(each) for each in priced.visited]
                is_mixed = bound < below and not is_closed(incumbent, bound, gap)
                if priced.is_over_elsewhere or (is_mixed and not is_over(deadline) and ask(priced.mixture)):
                    return Best(best, bound, prices, False, is_over_elsewhere=True, visited=tuple(visited))
            is_widest = share > (WIDEST if min(incumbent, limit) < math.inf else WIDE) or below >= min(incumbent, limit)
            if is_closed(incumbent, bound, gap) or is_over(deadline):
                break
            # If counts take long, a larger margin may have choices that are near enough.
            counting = (
                tolerances
                if is_widest and not is_expensive
                else replace(tolerances, longest=min(EFFORT, tolerances.longest))
            )
            if rows is None:
                found = Best(None, math.inf, prices)
            else:
                found = best_below(rows, constant, start, below, deadline, gap, counting, incumbent, ask)
                if found.is_over_elsewhere:
                    return replace(
                        found, choices=best, bound=max(bound, min(found.bound, below)), visited=tuple(visited)
                    )
            made = None if found.choices is None else left[0].extend(found.choices)
            best, incumbent = _faster(whole.problems[0], made, best, incumbent)
            bound = max(bound, min(found.bound, below, incumbent))
            # Combining visited choices takes longer than counting near ones.
            if is_mixed and not is_closed(incumbent, bound, gap) and not is_over(deadline):
                made = crossed(whole, visited, start, bound, incumbent, gap)
                best, incumbent = _faster(whole.problems[0], made, best, incumbent)
            is_within = found.is_searched and found.bound < below - 2 * TOLERANCE * abs(below)
            is_stopped = not found.is_searched and tolerances.effort(incumbent, bound) < math.inf
            if bound > largest_seconds:  # no choices are within the budgets: prices of no end prove ever more
                return Best(None, math.inf, prices)
            if is_closed(incumbent, bound, gap) or is_stopped or is_within or is_widest or is_over(deadline):
                break
            if found.reached >= below and steps < MAX_STEPS:  # at other prices, which may prove less of the whole
                steps += 1
                others = tuple((NEARER * np.array(found.prices) + (1 - NEARER) * np.array(prices)).tolist())
                there, _ = whole.at(others)
                near = cheapest(near, whole.reduced_costs(others, widest))
                if there > reached:
                    reached, prices = there, others
            else:
                share, near, steps = WIDER * share, None, 0
    except TimeLimitError:
        pass
    return Best(best, bound, prices, visited=tuple(visited))


def _best_of_wide(
    problems: Sequence[Problem],
    start: tuple[float, ...],
    visited: Sequence[tuple[int, ...]],
    incumbent: float,
    limit: float,
    deadline: float,
    gap: float,
    tolerances: Tolerances,
    is_over_elsewhere: OverElsewhere,
) -> Best:
    """Bound the whole by messages at the best prices; solve the rest within a margin if its treewidth is low.

    Before that, the optimum given fixed nodes is searched, unless the task is only to prove that nothing is faster than
    a cut-off. The remaining problem has prices of its own, at which the bound of the whole may be higher, and less is
    within a margin.
    """
    best, bound, prices, near, last = None, -math.inf, start, gap, gap
    whole, largest_seconds = WideRows(problems, deadline), (1 + TOLERANCE) * problems[0].largest_seconds
    if visited and tolerances.cutoff >= sys.float_info.max and whole.num_entries > FIXED_ENTRIES:
        nearby = _best_nearby(problems, start, visited, min(incumbent, limit), deadline, gap)
        if nearby.choices is not None:
            best, incumbent = _faster(problems[0], nearby.choices, best, incumbent)
            if is_over_elsewhere(((nearby.choices, 1.0),)):
                return Best(best, bound, nearby.prices, is_searched=False, is_over_elsewhere=True)
            visited, prices = [nearby.choices, *visited], nearby.prices
            near, last = max(gap, tolerances.counted), max(gap, tolerances.wide_gap)
    try:
        scale = min((problems[0].seconds_of(each) for each in visited), default=math.inf)
        finely = best is None and any(prices) and scale < math.inf
        if finely:
            whole.finely()
        if finely or math.isinf(scale):
            bound, _ = whole.at(prices, sufficient=tolerances.cutoff)
            if math.isinf(bound):
                return Best(None, bound, start)
            if bound >= tolerances.cutoff:
                return Best(best, bound, prices, is_searched=False)
        # Prices whose bound exceeds the seconds of the fastest visited choices are near the best.
        if not (finely and bound > scale):
            scale = abs(bound) if math.isinf(scale) else scale
            priced = best_prices(
                whole, prices, scale, 0.0, near, deadline, RADIUS, PRICED_NEAR, visited, tolerances.cutoff, last
            )
            bound, prices = priced.bound, priced.prices
            if priced.seconds < incumbent:
                best, incumbent = priced.choices, priced.seconds
            if is_closed(incumbent, bound, last) or bound >= tolerances.cutoff:
                return Best(best, bound, prices)
        whole.finely()
        at, share, widest = prices, FIRST_MARGIN, WIDE
        reached, _ = whole.at(at, sufficient=(1 - gap) * incumbent)
        bound = max(bound, reached)
        while not is_closed(incumbent, bound, gap) and not is_over(deadline) and LEAST_MARGIN < share < widest:
            if bound >= min(tolerances.cutoff, largest_seconds):
                break
            most = min(incumbent, limit)
            margin = min(share * abs(reached), most - reached) + TOLERANCE * abs(reached)
            left = whole.within(at, margin)
            rows = Rows.of([each.problem for each in left], deadline, LEFT_WORK)
            if rows is None:
                share, widest = share / GROWTH, share
                continue
            # What is left may have the best answer that is found, though it is not within the margin.
            below = min(most, reached + WIDER * margin)
            found = best_below(rows, constant_of(left), at, below, deadline, gap, tolerances, incumbent)
            made = None if found.choices is None else left[0].extend(found.choices)
            best, incumbent = _faster(problems[0], made, best, incumbent)
            bound, share = max(bound, min(found.bound, reached + margin, incumbent)), GROWTH * share
            proves_more = found.reached > reached
            prices = found.prices if proves_more else prices
            if not found.is_searched or margin >= min(incumbent, limit) - reached:
                break
            if proves_more:
                there, _ = whole.at(prices)
                bound = max(bound, there)
                if there - reached > NEARER * (min(incumbent, limit, found.reached) - reached):
                    reached, at, widest = there, prices, WIDE
    except TimeLimitError:
        pass
    # Where no choices are within the budgets, prices of no end prove ever more.
    return Best(best, math.inf if bound > largest_seconds else bound, prices)


def _best_nearby(
    problems: Sequence[Problem],
    prices: tuple[float, ...],
    visited: Sequence[tuple[int, ...]],
    incumbent: float,
    deadline: float,
    gap: float,
) -> Best:
    """Return the optimum given some nodes fixed as in the fastest visited choices, so that the rest has low treewidth.

    Its bound is that of the rest.
    """
    fastest = min(visited, key=problems[0].seconds_of)
    fixed = {node: fastest[node] for node in separators(problems[0], FIXED_BAG)}
    rest, seconds = [with_fixed(each, fixed) for each in problems], FIXED_SHARE * seconds_until(deadline)
    near = max(gap, FIXED_NEAR)
    return solve_rows(
        rest, prices, incumbent, seconds, near, Tolerances(near, near, longest=FIXED_EFFORT), [fastest], False
    )


def _faster(
    problem: Problem, made: tuple[int, ...] | None, best: tuple[int, ...] | None, incumbent: float
) -> tuple[tuple[int, ...] | None, float]:
    """Return the best choices so far and the seconds known, or others that were made, if they are faster."""
    seconds = math.inf if made is None else problem.seconds_of(made)
    return (made, seconds) if seconds < incumbent else (best, incumbent)


def _lifted_predicate(ask: OverElsewhere, extend: Callable[[tuple[int, ...]], tuple[int, ...]]) -> OverElsewhere:
    """Adapt a predicate on mixtures of the original problem to mixtures of the presolved problem."""
    return lambda mixture: ask(tuple([(extend(choices), weight) for choices, weight in mixture]))
