"""Graphs of low treewidth: dynamic programming, except for a small remaining problem.

1. Min-plus elimination gives the optimum without the memory row. If it fits, it is the answer.
2. Else a price for memory gives a bound L(λ) and a solution that fits (`lagrangian`). Where these are near each other,
   what costs more than the difference is left out (`min_marginals`, `fixing`), and the search goes on in what is left,
   where it is cheap.
3. Once no price proves more, labels of seconds and bytes (`remaining.labels`) give solutions that fill the budget, and
   are nearly the best. If a smaller gap is requested and is not expensive, counts of equal parts
   (`remaining.counting_ilp`) solve the rest, within an ε of the bound that grows up to that solution.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from autopar.console.units import format_share
from autopar.errors import CutOffError, InfeasibleError, TimeLimitError, warn_user
from autopar.solver.deadline import is_over, seconds_until, why_over
from autopar.solver.elimination.bucket_elimination import CHEAP_WORK, Elimination, narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.min_marginals import shared_reduced_costs
from autopar.solver.ilp import solve_ilp
from autopar.solver.infeasibility import MemoryLimitError, describe_conflict
from autopar.solver.lagrangian import (
    NOTHING,
    Least,
    LeastByElimination,
    Point,
    Relaxation,
    Visited,
    is_closed,
    maximise_bound,
    point,
    priced,
)
from autopar.solver.presolve.reduced_cost_fixing import Remaining, remaining
from autopar.solver.presolve.reduction import reduce_problem
from autopar.solver.problem import Problem, Solution
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.labels import best_labels
from autopar.solver.remaining.remaining_choices import Counted, Evaluated, RemainingProblem, TooManyChoicesError

TOLERANCE = 1e-9  # of the seconds: a smaller gap counts as none
FIRST_EPSILON = 2e-5  # of the bound: margin of the first remaining problem
UNPROVEN = "before the plan was proven best"
NEAR = 0.01  # of the seconds: of a solution that is not so near the bound, little can be left out
EXPENSIVE_NEAR = 5e-4  # of the seconds: the same where elimination takes seconds, and labels find better ones first
SHRUNK = 0.9  # of a problem's choices, as a logarithm: what is left of more is no other problem
GROWTH = 4.0  # of ε from round to round
WIDER = 16.0  # times ε: what is looked at once for several rounds
SPREAD = (0.02, 0.1, 0.5)  # of a start price: distances at which the next prices are evaluated
EFFORT = 1.0  # CP-SAT's deterministic seconds of each count, where the best solution is near enough already
ILP_PAIRS = 200_000  # pairs of strategies that the plain ILP takes with several rows
FIXABLE = 5e-4  # of the bound: where a solution is so near, what cannot be better is left out


@dataclass(frozen=True, slots=True)
class Start:
    """Starting point of a search for a memory price."""

    price: float = 0.0
    """Price at which the solution nearly fits; 0 if none is known."""
    incumbent: Point | None = None
    """A solution that fits."""
    near: float = 0.0
    """Gap, as a share of the bound, at which the search ends."""
    cutoff: float = math.inf
    """Bound in seconds at which the search ends."""
    is_expensive: bool = False
    """True if evaluations take seconds.

    A fitting solution is then first looked for at a price, and only after that by fewest bytes.
    """


COLD = Start()


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Tolerances of a search, as shares of the seconds: gaps at which it may stop if more is expensive."""

    expensive: float = 0.0
    """Gap at which the search may stop if elimination takes seconds."""
    counted: float = 0.0
    """Gap at which long counts of equal parts are broken off; if infinite, they always are."""
    cutoff: float = math.inf
    """Seconds of another solution: where memory has a price, and its bound is as high, the search ends."""
    longest: float = math.inf
    """CP-SAT's deterministic seconds after which any count is broken off, however near a solution is."""
    wide_gap: float = 0.0
    """Gap on a graph of high treewidth, once the solutions given the fixed nodes were searched (`several_rows`)."""

    def effort(self, seconds: float, bound: float) -> float:
        """Return CP-SAT's deterministic seconds for one count, given a solution of `seconds`."""
        is_near = math.isinf(self.counted) or is_closed(seconds, bound, self.counted)
        return min(EFFORT if is_near else math.inf, self.longest)


EXACT = Tolerances()


def by_elimination(
    problem: Problem,
    tables: Tables,
    elimination: Elimination,
    deadline: float,
    gap: float,
    price: float = 0.0,
    incumbent: Point | None = None,
    tolerances: Tolerances = EXACT,
    visited: Visited | None = None,
) -> Solution:
    """Solve a problem of low treewidth: dynamic programming, except for a small remaining problem.

    `price` is one that nearly fits, if there is one, and `incumbent` a solution that fits; `visited` are the solutions
    visited at prices (`LeastByElimination`). A solution within `tolerances` ends the search if more would be expensive.
    """
    is_expensive = elimination.work > CHEAP_WORK
    start = Start(price, incumbent, FIXABLE if is_expensive else 0.0, tolerances.cutoff, is_expensive)

    least = LeastByElimination(problem, elimination, tables, deadline, visited)

    def smallest() -> Point | None:
        found = least.smallest()
        if found is not None and not problem.fits(found.num_bytes):
            raise MemoryLimitError(problem, deadline)
        return found

    relaxed = best_bound(problem, least, smallest, deadline, start)
    assert relaxed is not None
    if relaxed.multiplier == 0 and is_closed(relaxed.incumbent.seconds, relaxed.bound, TOLERANCE):
        return solution_of(relaxed.incumbent, relaxed.bound, "elimination")
    if relaxed.bound >= tolerances.cutoff:
        raise CutOffError(relaxed.bound)
    if is_closed(
        relaxed.incumbent.seconds, relaxed.bound, max(TOLERANCE, gap, tolerances.expensive if is_expensive else 0.0)
    ):
        found = solution_of(relaxed.incumbent, relaxed.bound, "multiplier", relaxed.multiplier)
        return replace(found, smaller=tuple(each.choices for each in relaxed.smaller))
    is_near = is_closed(relaxed.incumbent.seconds, relaxed.bound, EXPENSIVE_NEAR if is_expensive else NEAR)
    try:
        near = _fixed_by_cost(problem, elimination, least, relaxed, deadline) if is_near else None
    except TimeLimitError:
        warn(relaxed.incumbent.seconds, relaxed.bound)
        return solution_of(relaxed.incumbent, relaxed.bound, "multiplier", relaxed.multiplier)
    if near is None:
        return _close_the_gap(problem, elimination, least, relaxed, deadline, gap, tolerances)
    # What is left out costs more than the best so far.
    tables = Tables(near.problem)
    smaller = narrow_elimination(near.problem, tables)
    assert smaller is not None
    seen = point(near.problem, near.restrict(relaxed.incumbent.choices))
    tolerances = replace(tolerances, cutoff=math.inf)  # that is of seconds with the constant
    left = by_elimination(near.problem, tables, smaller, deadline, gap, incumbent=seen, tolerances=tolerances)
    best = min(relaxed.incumbent, point(problem, near.extend(left.choices)), key=lambda each: each.seconds)
    bound = min(max(relaxed.bound, near.constant + left.bound), best.seconds)
    found = solution_of(best, bound, left.solver, left.multiplier or relaxed.multiplier)
    return replace(found, smaller=tuple(map(near.extend, left.smaller)))


def _fixed_by_cost(
    problem: Problem, elimination: Elimination, least: LeastByElimination, relaxed: Relaxation, deadline: float
) -> Remaining | None:
    """Return the problem without what costs more than the best so far at the best price; None where that is not
    much.
    """
    # Excesses carry the rounding of long sums; a strategy too many does no harm.
    margin = relaxed.incumbent.seconds - relaxed.bound + TOLERANCE * abs(relaxed.incumbent.seconds)
    weighted = least.evaluated(relaxed.multiplier)
    found = shared_reduced_costs(problem, elimination, least.tables, weighted, margin, deadline)
    left = remaining(problem, found, margin)
    return left if num_choices(left.problem) <= SHRUNK * num_choices(problem) else None


def best_bound(
    problem: Problem, least: Least, smallest: Callable[[], Point | None], deadline: float, start: Start = COLD
) -> Relaxation | None:
    """Return the optimum without the memory row if that fits, else the best bound that a price for memory proves.

    None where `least`, or `smallest` of those that fit, finds no choices.
    """
    found, large, small = _starting_points(problem, least, start)
    if large is None:
        free, large = least(0.0)
        if free == np.inf:
            raise InfeasibleError(describe_conflict(problem, deadline))
        if large is None:
            return None
        if problem.fits(large.num_bytes):
            return Relaxation(0.0, free, large)
        found = found.or_better(Relaxation(0.0, free, NOTHING))
    if start.is_expensive and small is None and start.incumbent is None and problem.budget:
        price = abs(large.seconds) / problem.budget  # a full row costs as much as all else: mostly that fits
        reached, visited = least(price)
        found = found.or_better(priced(reached, price, problem.budget, visited))
        small = visited if visited is not None and problem.fits(visited.num_bytes) else None
    small = small or start.incumbent or smallest()
    if small is None:
        return None
    return maximise_bound(problem, least, found, large, small, deadline, start.near, start.cutoff)


def _starting_points(problem: Problem, least: Least, start: Start) -> tuple[Relaxation, Point | None, Point | None]:
    """Return the bound proven near the starting price, a solution over the budget there, and one that fits."""
    found, price = Relaxation(0.0, -math.inf, NOTHING), start.price
    large: Point | None = None
    small: Point | None = None
    for step in SPREAD if price and problem.budget is not None else ():
        reached, visited = least(price)
        if visited is None or reached == np.inf:
            break
        assert problem.budget is not None
        found = found.or_better(priced(reached, price, problem.budget, visited))
        large, small = (large, visited) if problem.fits(visited.num_bytes) else (visited, small)
        if large is not None and small is not None:
            break
        price *= 1 + step if large is not None else 1 / (1 + step)
    return found, large, small


def _close_the_gap(
    problem: Problem,
    elimination: Elimination,
    least: LeastByElimination,
    relaxed: Relaxation,
    deadline: float,
    gap: float,
    tolerances: Tolerances,
) -> Solution:
    """Close the gap between the bound of a price and the optimum, by fixing with min-marginals and counting ILPs."""
    incumbent, bound = relaxed.incumbent, relaxed.bound
    rounding = TOLERANCE * abs(incumbent.seconds)
    epsilon = FIRST_EPSILON * abs(bound)
    found, widest, is_labelled, is_small = None, 0.0, False, True
    while not is_closed(incumbent.seconds, bound, max(TOLERANCE, gap)):
        if is_over(deadline):
            warn(incumbent.seconds, bound)
            break
        most = incumbent.seconds - relaxed.bound
        epsilon = most if most <= GROWTH * epsilon else epsilon  # no round before the last where that is near
        limit = min(relaxed.bound + epsilon, incumbent.seconds)
        # Excesses carry the rounding of long sums; a strategy too many does no harm.
        margin = limit - relaxed.bound + rounding
        try:
            if found is None or margin > widest:
                widest = max(margin, min(WIDER * epsilon, most) + rounding)
                weighted = least.evaluated(relaxed.multiplier)
                found = shared_reduced_costs(problem, elimination, least.tables, weighted, widest, deadline)
            near = remaining(problem, found, margin)
            reduced = reduce_problem(near.problem)
            constant = near.constant + reduced.constant
            result = Counted(None, math.inf, True)
            if constant < np.inf:
                below = limit - constant
                left, prices = (reduced.problem,), (relaxed.multiplier,)
                if is_labelled:
                    effort = tolerances.effort(incumbent.seconds, bound)
                    result = best_left(left, prices, below, rounding / 2, deadline, effort)
                else:
                    result, is_small = labelled(left, prices, below, deadline)
        except TimeLimitError:
            continue  # the time is over
        if result.choices is not None:
            choices = near.extend(reduced.extend(result.choices))
            incumbent = min(incumbent, point(problem, choices), key=lambda each: each.seconds)
        # What is left out costs more than `limit`, what is left no less than the bound that was found.
        bound = max(bound, min(constant + result.bound, limit))
        if not is_labelled and not (result.is_proven and limit < incumbent.seconds):
            if not is_small and is_closed(incumbent.seconds, bound, tolerances.counted):
                break
            is_labelled = True
            continue
        if not result.is_proven:
            if not is_closed(incumbent.seconds, bound, tolerances.counted):
                warn(incumbent.seconds, bound)
            break
        epsilon, is_labelled = GROWTH * epsilon, False
    return solution_of(incumbent, bound, "multiplier + counts", relaxed.multiplier)


def labelled(
    problems: Sequence[Problem],
    prices: Sequence[float],
    limit: float,
    deadline: float,
    evaluated: Evaluated | None = None,
) -> tuple[Counted, bool]:
    """Return the best that labels find, and whether what may be better is soon counted."""
    try:
        remaining_problem = RemainingProblem(problems, prices, limit, deadline, evaluated)
        found = best_labels(remaining_problem)
        seconds = limit if found.choices is None else problems[0].seconds_of(found.choices)
        return found, remaining_problem.below(min(limit, seconds)).is_small
    except TooManyChoicesError:
        return Counted(None, -math.inf, False), False


def best_left(
    problems: Sequence[Problem],
    prices: Sequence[float],
    limit: float,
    tolerance: float,
    deadline: float,
    effort: float,
    evaluated: Evaluated | None = None,
    only_few: bool = False,
) -> Counted:
    """Solve the remaining problem by counting ILPs, or by the plain ILP if it has too many choices for that.

    With `only_few`, TooManyChoicesError is raised instead if counting would take long.
    """
    try:
        remaining_problem = RemainingProblem(problems, prices, limit, deadline, evaluated)
        if only_few and not remaining_problem.is_small:
            raise TooManyChoicesError
        return best_counts(remaining_problem, tolerance, effort)
    except TooManyChoicesError:
        if only_few:
            raise
        if len(problems) > 1 and sum(edge.seconds.size for edge in problems[0].edges) > ILP_PAIRS:
            return Counted(None, -math.inf, False)
        counts_work = effort < math.inf
        left = effort if counts_work else seconds_until(deadline)
        result = solve_ilp(problems[0], left, tolerance=tolerance, rows=problems[1:], repeatable=counts_work)
        return Counted(result.choices, min(result.bound, limit), result.status != "timeout")


def solution_of(found: Point, bound: float, solver: str, multiplier: float = 0.0) -> Solution:
    proven = found.seconds if is_closed(found.seconds, bound, TOLERANCE) else bound
    return Solution(found.choices, found.seconds, found.num_bytes, proven, solver, multiplier)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Without warnings of what is not proven on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def warn(seconds: float, bound: float, why: str = "") -> None:
    """Warn that a plan is not proven best; by default since the time was over."""
    why = why or f"{why_over()} {UNPROVEN}"
    share = (seconds - bound) / abs(seconds) if seconds else 0.0
    warn_user(
        f"{why}: it takes {seconds:.6g} s, and no plan takes less than {bound:.6g} s ({format_share(share)} less). "
        "Raise the time limit, or give up a little more with Search(gap=…).",
        RuntimeWarning,
    )


def num_choices(problem: Problem) -> float:
    """Return the logarithm of the number of choices of a problem."""
    return sum(math.log(node.num_strategies) for node in problem.nodes)
