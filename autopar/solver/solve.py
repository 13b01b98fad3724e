"""Solve a problem exactly and fast: elimination, a price for memory, and an ILP over the little that is left.

1. Min-plus elimination gives the optimum without the memory row. If it fits, it is the answer.
2. Else a multiplier on the memory row gives a bound L(λ) and a solution that fits (`lagrangian`).
3. Min-marginals at λ forbid whatever is in no solution below bound + ε (`min_marginals`); exact reductions and an ILP
   over counts of equal parts solve the rest (`reduction`, `counting_ilp`). A solution below bound + ε is optimal; else
   ε grows up to the incumbent.

Equal problems get equal solutions, unless time runs out. `solver="ilp"` hands the whole problem to the ILP, as the
reference. Where a graph is too wide for elimination, neighbourhoods of it are not (`neighbourhoods`), and give the ILP
a start.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autopar.errors import InfeasibleError, PlanError, TimeLimitError
from autopar.solver.counting_ilp import Counted, TooManyChoicesError, best_counts
from autopar.solver.deadline import NOTHING_FOUND, after, is_over, seconds_until
from autopar.solver.elimination import (
    CHEAP_WORK,
    Elimination,
    Tables,
    choices_of,
    evaluate,
    narrow_elimination,
    optimum,
)
from autopar.solver.ilp import IlpResult, solve_ilp
from autopar.solver.infeasibility import MemoryLimitError, describe_conflict
from autopar.solver.lagrangian import (
    NOTHING,
    Least,
    LeastByElimination,
    Point,
    Relaxation,
    is_closed,
    maximise_bound,
    point,
    priced,
)
from autopar.solver.min_marginals import excesses, shared_excesses
from autopar.solver.neighbourhoods import good_solution
from autopar.solver.problem import Problem, Solution
from autopar.solver.reductions.contraction import contract
from autopar.solver.reductions.fixing import Remaining, remaining
from autopar.solver.reductions.reduction import prune, reduce_problem
from autopar.solver.relaxation.levelling import DEAR_WORK, Levelling, loosen
from autopar.solver.relaxation.loosened import Loosened
from autopar.units import format_share

TOLERANCE = 1e-9  # of the seconds: a smaller gap counts as none
FIRST_EPSILON = 2e-5  # of the bound: where the first residual ends
TIME_PASSED = "the time limit passed before the plan was proven best"
SEARCHING = 0.25  # of the time goes to a good solution where the graph is too wide for elimination
ILP_ROUNDING = 1e-5  # of the seconds: what the ILP's whole numbers may leave open
GOOD_START = 0.01  # how far from the best the neighbourhoods of that search are solved
SHRUNK = 0.9  # of a problem's choices, as a logarithm: what is left of more is no other problem
NEAR = 2e-3  # of the seconds: a bound so near decides most strategies
WORK_PER_S = 300_000_000  # entries of an elimination that are surely computed in a second
GROWTH = 4.0  # of ε from round to round
WIDER = 16.0  # times ε: what is looked at once for several rounds
SPREAD = (0.02, 0.1, 0.5)  # of a price to start from: how far beside it the next ones are looked at
FIXABLE = 5e-4  # of the bound: where a solution is so near, what cannot be better is left out
FINE = 0.01  # of the tolerance: where excesses of equal layers are the same


@dataclass(frozen=True, slots=True)
class Start:
    """What a search for a price of memory begins with."""

    price: float = 0.0
    """That nearly fits; 0: none is known."""
    known: Point | None = None
    """A solution that fits."""
    near: float = 0.0
    """Where the best solution is so near the bound, as a share of it, the search ends."""


COLD = Start()


def solve(
    problem: Problem,
    *,
    solver: Literal["auto", "ilp"] = "auto",
    time_limit: float = 120.0,
    gap: float = 0.0,
    price: float = 0.0,
) -> Solution:
    """The best choice per node, with a lower bound on what any choice costs.

    Under a memory limit, or where the graph is too wide for elimination, a solution is good enough when it is proven to
    be within `gap` (a share of its seconds) of the best; else it is always the best. `price` is one of memory, in
    seconds per byte, that is near that of the answer, where one is known: the search is shorter from there.

    After `time_limit` seconds the best solution found so far is returned with its bound, and a warning is given;
    what has begun is broken off a moment later (`deadline.GRACE`).
    Raises InfeasibleError when the pins contradict each other or no choice fits the memory limit, and TimeLimitError
    when time runs out before any solution is found.
    """
    if solver not in ("auto", "ilp"):
        raise PlanError(f"solver {solver!r} is not known; use 'auto' or 'ilp'.")
    deadline = after(time_limit)
    if solver == "ilp":
        if problem.forbidden_node is not None:
            raise InfeasibleError(describe_conflict(problem, deadline))
        return _from_ilp(problem, solve_ilp(problem, seconds_until(deadline)), "ilp", deadline)
    solution = _by_reduction(problem, deadline, gap, only_narrow=False, price=price)
    assert solution is not None
    return solution


def solve_narrow(problem: Problem, time_limit: float = 120.0, gap: float = 0.0) -> Solution | None:
    """As `solve`, but None, after little work, where the graph is not narrow enough for cheap elimination."""
    return _by_reduction(problem, after(time_limit), gap, only_narrow=True)


def _by_reduction(
    problem: Problem, deadline: float, gap: float, only_narrow: bool, price: float = 0.0
) -> Solution | None:
    """What can be decided beforehand is pruned away, and the rest is solved."""
    if problem.forbidden_node is not None:
        raise InfeasibleError(describe_conflict(problem, deadline))
    pruned = prune(problem)
    if pruned.problem.forbidden_node is not None:
        raise InfeasibleError(describe_conflict(problem, deadline))
    contracted = contract(pruned.problem)
    try:
        solution = _solve_pruned(contracted.problem, deadline, gap, only_narrow, price)
    except MemoryLimitError:
        raise MemoryLimitError(problem, deadline) from None  # with the pins that were pruned away
    except InfeasibleError:
        raise InfeasibleError(describe_conflict(problem, deadline)) from None
    if solution is None:
        return None
    choices = pruned.extend(contracted.extend(solution.choices))
    seconds = problem.seconds_of(choices)  # the same sum in another order: it may round differently
    bound = seconds if solution.gap == 0 else min(solution.bound, seconds)
    return replace(solution, choices=choices, seconds=seconds, bound=bound)


def _solve_pruned(
    problem: Problem, deadline: float, gap: float, only_narrow: bool, price: float = 0.0
) -> Solution | None:
    tables = Tables(problem)
    elimination = narrow_elimination(problem, tables)
    if elimination is None or elimination.work > DEAR_WORK:
        if only_narrow:
            return None
        loose = loosen(problem)
        if loose is not None:
            return _by_relaxation(problem, loose, deadline, gap)
    if elimination is None:
        return _by_reduced_ilp(problem, deadline, gap)
    return _by_elimination(problem, tables, elimination, deadline, gap, price)


def _by_relaxation(
    problem: Problem, loose: Loosened, deadline: float, gap: float, is_near_enough: bool = True
) -> Solution:
    """The graph is wide: a bound with copies of its nodes decides most strategies; the rest is narrow, or narrower.

    Without a limit a bound that `is_near_enough` is tried first: the last rounds of levelling gain little.
    """
    near = NEAR if is_near_enough and problem.budget is None else 0.0
    searching = deadline - SEARCHING * seconds_until(deadline)
    levelling = Levelling(problem, loose, searching, near)
    relaxed = _relaxed(problem, levelling.least, lambda: _smallest_by_relaxation(problem, searching), searching)
    if relaxed is None:
        return _by_dear_search(problem, None, deadline, gap)
    best, price = relaxed.incumbent, relaxed.multiplier
    if is_closed(best.seconds, relaxed.bound, max(TOLERANCE, gap)):
        return _solution(best, relaxed.bound, "relaxation", price)
    # Excesses carry the rounding of long sums; a strategy too many does no harm.
    try:
        left = levelling.without(price, best.seconds * (1 + TOLERANCE) + price * (problem.budget or 0))
    except TimeLimitError:
        left = None
    if left is None or is_over(searching):
        _warn(best.seconds, relaxed.bound)
        return _solution(best, relaxed.bound, "relaxation", price)
    is_smaller = _num_choices(left.problem) <= SHRUNK * _num_choices(problem)
    if near and not is_smaller:
        return _by_relaxation(problem, levelling.loose, deadline, gap, is_near_enough=False)
    if not is_smaller:
        start = replace(relaxed, incumbent=point(left.problem, left.restrict(best.choices)))
        solution = _by_dear_search(left.problem, start, deadline, gap)
    else:
        found = _solve_pruned(left.problem, deadline, gap, only_narrow=False)
        assert found is not None
        solution = found
    exact = point(problem, left.extend(solution.choices))
    best = min(best, exact, key=lambda each: each.seconds)
    # What is left out costs more than the best of before, and so than this.
    bound = min(max(solution.bound, relaxed.bound), best.seconds)
    return _solution(best, bound, f"relaxation, {solution.solver}", solution.multiplier)


def _num_choices(problem: Problem) -> float:
    """How many choices a problem has, as a logarithm."""
    return sum(math.log(node.num_strategies) for node in problem.nodes)


def _by_dear_search(problem: Problem, relaxed: Relaxation | None, deadline: float, gap: float) -> Solution:
    """The graph stays wide: a long elimination if there is time for one, or the ILP from what is known."""
    tables = Tables(problem)
    elimination = narrow_elimination(problem, tables)
    if elimination is not None and elimination.work < WORK_PER_S * seconds_until(deadline):
        return _by_elimination(problem, tables, elimination, deadline, gap)
    return _by_reduced_ilp(problem, deadline, gap, relaxed)


def _smallest_by_relaxation(problem: Problem, deadline: float) -> Point | None:
    """Choices that fit, of few bytes; None where none were found. Raises MemoryLimitError where there are none."""
    in_bytes = problem.in_bytes()
    loose = loosen(in_bytes)
    assert loose is not None and problem.budget is not None
    least, found = Levelling(in_bytes, loose, deadline).least(0.0)
    if found is not None and problem.fits(problem.bytes_of(found.choices)):
        return point(problem, found.choices)
    if least > problem.budget * (1 + TOLERANCE):
        raise MemoryLimitError(problem, deadline)
    return None


def smallest_bytes(problem: Problem, time_limit: float = 120.0) -> int:
    """The least bytes of any choice that avoids what is forbidden, exactly; InfeasibleError if there is none."""
    tables, deadline = Tables(problem), after(time_limit)
    elimination = narrow_elimination(problem, tables)
    if elimination is not None:
        least = optimum(elimination, evaluate(elimination, tables.bytes_only(), deadline))
        status = "optimal" if math.isfinite(least) else "infeasible"
    else:
        result = solve_ilp(problem, time_limit, by_bytes=True)
        least, status = result.bound, result.status
    if status == "infeasible":
        raise InfeasibleError(describe_conflict(problem, deadline))
    if status == "timeout":
        raise TimeLimitError(f"the least memory was not found in {time_limit:g} s; raise the time limit.")
    return round(least)


def _by_elimination(
    problem: Problem,
    tables: Tables,
    elimination: Elimination,
    deadline: float,
    gap: float,
    price: float = 0.0,
    known: Point | None = None,
) -> Solution:
    """The graph is narrow: everything but a small residual is dynamic programming.

    `price` is one that nearly fits, where it is known, and `known` a solution that fits.
    """
    start = Start(price, known, FIXABLE if elimination.work > CHEAP_WORK else 0.0)

    def smallest() -> Point:
        evaluated = evaluate(elimination, tables.bytes_only(), deadline)
        least_bytes = point(problem, choices_of(elimination, evaluated))
        if not problem.fits(least_bytes.num_bytes):
            raise MemoryLimitError(problem, deadline)
        return least_bytes

    least = LeastByElimination(problem, elimination, tables, deadline)
    relaxed = _relaxed(problem, least, smallest, deadline, start)
    assert relaxed is not None
    if relaxed.multiplier == 0 and is_closed(relaxed.incumbent.seconds, relaxed.bound, TOLERANCE):
        return _solution(relaxed.incumbent, relaxed.bound, "elimination")
    if is_closed(relaxed.incumbent.seconds, relaxed.bound, max(TOLERANCE, gap)):
        return _solution(relaxed.incumbent, relaxed.bound, "multiplier", relaxed.multiplier)
    near = _near(problem, elimination, least, relaxed, deadline)
    if near is None:
        return _close_the_gap(problem, elimination, least, relaxed, deadline, gap)
    # What is left out costs more than the best so far.
    tables = Tables(near.problem)
    smaller = narrow_elimination(near.problem, tables)
    assert smaller is not None
    seen = point(near.problem, near.restrict(relaxed.incumbent.choices))
    left = _by_elimination(near.problem, tables, smaller, deadline, gap, known=seen)
    best = min(relaxed.incumbent, point(problem, near.extend(left.choices)), key=lambda each: each.seconds)
    bound = min(max(relaxed.bound, near.constant + left.bound), best.seconds)
    return _solution(best, bound, left.solver, left.multiplier or relaxed.multiplier)


def _near(
    problem: Problem, elimination: Elimination, least: LeastByElimination, relaxed: Relaxation, deadline: float
) -> Remaining | None:
    """The problem without what costs more than the best so far at the best price; None where that is not much."""
    # Excesses carry the rounding of long sums; a strategy too many does no harm.
    margin = relaxed.incumbent.seconds - relaxed.bound + TOLERANCE * abs(relaxed.incumbent.seconds)
    weighted = least.evaluated(relaxed.multiplier)
    found = shared_excesses(problem, elimination, weighted, margin, deadline)
    left = remaining(problem, found, margin)
    return left if _num_choices(left.problem) <= SHRUNK * _num_choices(problem) else None


def _relaxed(
    problem: Problem, least: Least, smallest: Callable[[], Point | None], deadline: float, start: Start = COLD
) -> Relaxation | None:
    """The optimum without the memory row if that fits, else the best bound that a price for memory proves.

    None where `least`, or `smallest` of those that fit, finds no choices.
    """
    found, large, small = _around(problem, least, start)
    if large is None:
        free, large = least(0.0)
        if free == np.inf:
            raise InfeasibleError(describe_conflict(problem, deadline))
        if large is None:
            return None
        if problem.fits(large.num_bytes):
            return Relaxation(0.0, free, large)
        found = found.or_better(Relaxation(0.0, free, NOTHING))
    small = small or start.known or smallest()
    return None if small is None else maximise_bound(problem, least, found, large, small, deadline, start.near)


def _around(problem: Problem, least: Least, start: Start) -> tuple[Relaxation, Point | None, Point | None]:
    """What is proven near the price to start from, a solution over the budget there, and one that fits."""
    found, price = Relaxation(0.0, -math.inf, NOTHING), start.price
    large: Point | None = None
    small: Point | None = None
    for step in SPREAD if price and problem.budget is not None else ():
        reached, met = least(price)
        if met is None or reached == np.inf:
            break
        assert problem.budget is not None
        found = found.or_better(priced(reached, price, problem.budget, met))
        large, small = (large, met) if problem.fits(met.num_bytes) else (met, small)
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
) -> Solution:
    """From the bound of a price to the optimum: fixing by min-marginals, and counts of what is left."""
    incumbent, bound = relaxed.incumbent, relaxed.bound
    rounding = TOLERANCE * abs(incumbent.seconds)
    epsilon = FIRST_EPSILON * abs(bound)
    found, widest = None, 0.0
    while not is_closed(incumbent.seconds, bound, max(TOLERANCE, gap)):
        if is_over(deadline):
            _warn(incumbent.seconds, bound)
            break
        most = incumbent.seconds - relaxed.bound
        epsilon = most if most <= GROWTH * epsilon else epsilon  # no round before the last where that is near
        limit = min(relaxed.bound + epsilon, incumbent.seconds)
        # Excesses carry the rounding of long sums; a strategy too many does no harm.
        margin = limit - relaxed.bound + rounding
        try:
            if found is None or margin > widest:
                widest = min(WIDER * epsilon, most) + rounding
                weighted = least.evaluated(relaxed.multiplier)
                found = excesses(problem, elimination, weighted, widest, rounding * FINE, deadline)
            near = remaining(problem, found, margin)
            residual = reduce_problem(near.problem)
            constant = near.constant + residual.constant
            result = Counted(None, math.inf, True)
            if constant < np.inf:
                below = limit - constant
                result = _best_below(residual.problem, relaxed.multiplier, below, rounding / 2, deadline)
        except TimeLimitError:
            continue  # the time is over
        if result.choices is not None:
            incumbent = min(
                incumbent, point(problem, near.extend(residual.extend(result.choices))), key=lambda each: each.seconds
            )
        # What the residual leaves out costs more than `limit`, what it holds no less than the bound of its counts.
        bound = max(bound, min(constant + result.bound, limit))
        if not result.is_proven:
            _warn(incumbent.seconds, bound)
            break
        epsilon *= GROWTH
    return _solution(incumbent, bound, "multiplier + counts", relaxed.multiplier)


def _best_below(problem: Problem, multiplier: float, limit: float, tolerance: float, deadline: float) -> Counted:
    """What is left of a problem, solved by counts, or where it is too wide for that by the plain ILP."""
    try:
        return best_counts((problem,), (multiplier,), limit, tolerance, deadline)
    except TooManyChoicesError:
        result = solve_ilp(problem, seconds_until(deadline), tolerance=tolerance)
        return Counted(result.choices, min(result.bound, limit), result.status != "timeout")


def _solve_residual(problem: Problem, deadline: float, incumbent: Point | None = None, gap: float = 0.0) -> IlpResult:
    """The ILP on what exact reductions leave of a problem."""
    reduction = reduce_problem(problem)
    if reduction.constant == np.inf:
        return IlpResult(None, np.inf, "infeasible")
    hint = reduction.restrict(incumbent.choices) if incumbent else None
    tolerance = max(TOLERANCE / 2, gap) * abs(incumbent.seconds) if incumbent else 0.0
    result = solve_ilp(reduction.problem, seconds_until(deadline), hint, tolerance=tolerance)
    choices = reduction.extend(result.choices) if result.choices is not None else None
    return IlpResult(choices, reduction.constant + result.bound, result.status)


def _by_reduced_ilp(problem: Problem, deadline: float, gap: float, relaxed: Relaxation | None = None) -> Solution:
    """The graph is too wide for elimination: the ILP from a good solution, that of neighbourhoods if none is known."""
    if relaxed is None:
        searching = deadline - (1 - SEARCHING) * seconds_until(deadline)
        start = good_solution(problem, _narrow_solution, searching)
    else:
        start = relaxed.incumbent
    result = _solve_residual(problem, deadline, start, gap)
    if start is None:
        return _from_ilp(problem, result, "reduction + ilp", deadline)
    if result.status == "infeasible":  # below the solution that is there, up to the tolerance
        return _solution(start, start.seconds, "neighbourhoods + ilp")
    found = start if result.choices is None else min(start, point(problem, result.choices), key=lambda p: p.seconds)
    bound = max(result.bound, _sum_of_least(problem), -math.inf if relaxed is None else relaxed.bound)
    if not is_closed(found.seconds, bound, max(TOLERANCE, gap, ILP_ROUNDING)):
        _warn(found.seconds, bound)
    return _solution(found, bound, "neighbourhoods + ilp")


def _narrow_solution(problem: Problem, deadline: float) -> Point | None:
    """The best solution of a part of a wide problem, good enough to go on from; None where there is none."""
    if problem.forbidden_node is not None:
        return None  # what is held is forbidden
    pruned = prune(problem)
    tables = Tables(pruned.problem)
    elimination = narrow_elimination(pruned.problem, tables)
    if elimination is None:
        return None
    try:
        solution = _by_elimination(pruned.problem, tables, elimination, deadline, GOOD_START)
    except (InfeasibleError, TimeLimitError):
        return None
    return point(problem, pruned.extend(solution.choices))


def _sum_of_least(problem: Problem) -> float:
    """A bound that needs no search: every node and edge at its least."""
    return sum(float(part.seconds.min()) for part in (*problem.nodes, *problem.edges))


def _from_ilp(problem: Problem, result: IlpResult, solver: str, deadline: float) -> Solution:
    if result.status == "infeasible":
        with suppress(TimeLimitError):
            smallest_bytes(problem, seconds_until(deadline))  # raises where the pins alone contradict each other
        raise MemoryLimitError(problem, deadline)
    if result.choices is None:
        raise TimeLimitError(NOTHING_FOUND)
    solution = _solution(point(problem, result.choices), result.bound, solver)
    if result.status == "timeout":
        _warn(solution.seconds, solution.bound)
    return solution


def _solution(found: Point, bound: float, solver: str, multiplier: float = 0.0) -> Solution:
    proven = found.seconds if is_closed(found.seconds, bound, TOLERANCE) else bound
    return Solution(found.choices, found.seconds, found.num_bytes, proven, solver, multiplier)


def _warn(seconds: float, bound: float, why: str = TIME_PASSED) -> None:
    share = (seconds - bound) / abs(seconds) if seconds else 0.0
    warnings.warn(
        f"{why}: it takes {seconds:.6g} s, and no plan takes less than {bound:.6g} s ({format_share(share)} less). "
        "Raise the time limit, or give up a little more with gap=….",
        RuntimeWarning,
        stacklevel=4,
    )
