"""Solve a problem exactly and fast: elimination, a price for memory, and an ILP on the little that is left.

1. Min-plus elimination gives the optimum without the memory row. If it fits, it is the answer.
2. Else a multiplier on the memory row gives a bound L(λ) and a solution that fits (`multiplier`).
3. Min-marginals at λ forbid whatever is in no solution below bound + ε (`marginals`); exact reductions and the ILP
   solve the rest (`reduction`, `ilp`). A solution below bound + ε is optimal; else ε grows up to the incumbent.

Equal problems get equal solutions, unless time runs out. `solver="ilp"` hands the whole problem to the ILP, as the
reference. A graph too wide for elimination goes to the ILP after the exact reductions.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace
from typing import Literal

import numpy as np

from autopar.conflict import describe_conflict, is_feasible
from autopar.eliminate import Elimination, Tables, choices_of, evaluate, narrow_eliminations, optimum
from autopar.errors import InfeasibleError, PlanError
from autopar.ilp import IlpResult, solve_ilp
from autopar.marginals import excesses, keep_below
from autopar.multiplier import Point, maximise_bound, point
from autopar.problem import Problem, Solution, format_bytes
from autopar.pruning import prune
from autopar.reduction import reduce_problem

TOLERANCE = 1e-9  # of the seconds: a smaller gap counts as none
FIRST_EPSILON = 2e-5  # of the bound: where the first residual ends
GROWTH = 4.0  # of ε from round to round


def solve(problem: Problem, *, solver: Literal["auto", "ilp"] = "auto", time_limit: float = 120.0) -> Solution:
    """The best choice per node, with a lower bound on what any choice costs.

    After `time_limit` seconds the best solution found so far is returned with its bound, and a warning is given;
    eliminations that have begun are finished first.
    Raises InfeasibleError when the pins contradict each other or no choice fits the memory limit, and PlanError when
    time runs out before any solution is found.
    """
    if solver not in ("auto", "ilp"):
        raise PlanError(f"solver {solver!r} is not known; use 'auto' or 'ilp'.")
    if any(not np.isfinite(node.seconds).any() for node in problem.nodes):
        raise InfeasibleError(describe_conflict(problem))
    deadline = time.monotonic() + time_limit
    if solver == "ilp":
        return _by_ilp(problem, deadline)
    pruned = prune(problem)
    if any(not np.isfinite(node.seconds).any() for node in pruned.problem.nodes):
        raise InfeasibleError(describe_conflict(problem))
    try:
        solution = _solve_pruned(pruned.problem, deadline)
    except InfeasibleError:
        if is_feasible(problem):
            raise  # for want of memory
        raise InfeasibleError(describe_conflict(problem)) from None  # with the pins that were pruned away
    choices = pruned.extend(solution.choices)
    seconds = problem.seconds_of(choices)  # the same sum in another order: it may round differently
    bound = seconds if solution.gap == 0 else min(solution.bound, seconds)
    return replace(solution, choices=choices, seconds=seconds, bound=bound)


def _solve_pruned(problem: Problem, deadline: float) -> Solution:
    tables = Tables(problem)
    eliminations = narrow_eliminations(problem, tables)
    if eliminations is None:
        return _by_reduced_ilp(problem, deadline)
    return _by_elimination(problem, tables, eliminations, deadline)


def smallest_bytes(problem: Problem, time_limit: float = 120.0) -> int:
    """The least bytes of any choice that avoids what is forbidden, exactly; InfeasibleError if there is none."""
    tables = Tables(problem)
    eliminations = narrow_eliminations(problem, tables)
    if eliminations is not None:
        least = optimum(eliminations[0], evaluate(eliminations[0], tables.bytes_only()))
        status = "optimal" if math.isfinite(least) else "infeasible"
    else:
        result = solve_ilp(problem, time_limit, by_bytes=True)
        least, status = result.bound, result.status
    if status == "infeasible":
        raise InfeasibleError(describe_conflict(problem))
    if status == "timeout":
        raise PlanError(f"the least memory was not found in {time_limit:g} s; raise the time limit.")
    return round(least)


def _by_elimination(
    problem: Problem, tables: Tables, eliminations: tuple[Elimination, Elimination], deadline: float
) -> Solution:
    """The graph is narrow: everything but a small residual is dynamic programming."""
    elimination, calibration = eliminations
    evaluated = evaluate(elimination, tables.weighted(0.0))
    if optimum(elimination, evaluated) == np.inf:
        raise InfeasibleError(describe_conflict(problem))
    large = point(problem, choices_of(elimination, evaluated))
    if problem.fits(large.num_bytes):
        return Solution(large.choices, large.seconds, large.num_bytes, large.seconds, "elimination")
    small = point(problem, choices_of(elimination, evaluate(elimination, tables.bytes_only())))
    if not problem.fits(small.num_bytes):
        raise InfeasibleError(_too_little_memory(problem, small.num_bytes))
    relaxed = maximise_bound(problem, elimination, tables, large, small, deadline)
    if _is_closed(relaxed.incumbent.seconds, relaxed.bound):
        return _solution(relaxed.incumbent, relaxed.bound, "multiplier")
    evaluated = evaluate(calibration, tables.weighted(relaxed.multiplier))
    found = excesses(problem, calibration, evaluated)
    incumbent, bound = relaxed.incumbent, relaxed.bound
    epsilon = FIRST_EPSILON * abs(bound)
    while not _is_closed(incumbent.seconds, bound):
        limit = min(relaxed.bound + epsilon, incumbent.seconds)
        # Excesses carry the rounding of long sums; a strategy too many does no harm.
        margin = TOLERANCE * abs(limit) + limit - relaxed.bound
        result = _solve_residual(keep_below(problem, found, margin), deadline, incumbent)
        if result.choices is not None:
            incumbent = min(incumbent, point(problem, result.choices), key=lambda each: each.seconds)
        # What the residual leaves out costs more than `limit`, what it holds at least the ILP's bound.
        bound = max(bound, min(result.bound, limit, incumbent.seconds))
        if result.status == "timeout":
            _warn(incumbent.seconds, bound)
            break
        if incumbent.seconds <= limit:
            # Optimal; what the bound lacks is the rounding of costs to the ILP's units.
            break
        epsilon *= GROWTH
    return _solution(incumbent, bound, "multiplier + ilp")


def _solve_residual(problem: Problem, deadline: float, incumbent: Point | None = None) -> IlpResult:
    """The ILP on what exact reductions leave of a problem."""
    reduction = reduce_problem(problem)
    if reduction.constant == np.inf:
        return IlpResult(None, np.inf, "infeasible")
    hint = reduction.restrict(incumbent.choices) if incumbent else None
    tolerance = TOLERANCE / 2 * abs(incumbent.seconds) if incumbent else 0.0
    result = solve_ilp(reduction.problem, deadline - time.monotonic(), hint, tolerance=tolerance)
    choices = reduction.extend(result.choices) if result.choices is not None else None
    return IlpResult(choices, reduction.constant + result.bound, result.status)


def _by_reduced_ilp(problem: Problem, deadline: float) -> Solution:
    """The graph is too wide for elimination."""
    return _from_ilp(problem, _solve_residual(problem, deadline), "reduction + ilp")


def _by_ilp(problem: Problem, deadline: float) -> Solution:
    return _from_ilp(problem, solve_ilp(problem, deadline - time.monotonic()), "ilp")


def _from_ilp(problem: Problem, result: IlpResult, solver: str) -> Solution:
    if result.status == "infeasible":
        raise InfeasibleError(_too_little_memory(problem, smallest_bytes(problem)))
    if result.choices is None:
        raise PlanError(
            "the time limit passed before any choice of strategies was found; raise it, or forbid strategies."
        )
    solution = _solution(point(problem, result.choices), result.bound, solver)
    if result.status == "timeout":
        _warn(solution.seconds, solution.bound)
    return solution


def _solution(found: Point, bound: float, solver: str) -> Solution:
    return Solution(found.choices, found.seconds, found.num_bytes, min(bound, found.seconds), solver)


def _is_closed(seconds: float, bound: float) -> bool:
    return seconds - bound <= TOLERANCE * abs(seconds)


def _too_little_memory(problem: Problem, least: int) -> str:
    assert problem.budget is not None and least > problem.budget
    return (
        f"the memory limit is {format_bytes(problem.budget)} ({problem.budget} bytes) per device, but every choice "
        f"needs at least {format_bytes(least)} ({least} bytes). Raise the limit, use more devices, or loosen the pins."
    )


def _warn(seconds: float, bound: float) -> None:
    share = (seconds - bound) / abs(seconds) if seconds else 0.0
    warnings.warn(
        f"the time limit passed before the plan was proven best: it takes {seconds:.6g} s, and no plan takes less than "
        f"{bound:.6g} s ({share:.3%} less). Raise the time limit for a better one.",
        RuntimeWarning,
        stacklevel=4,
    )
