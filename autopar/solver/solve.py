"""Solve a problem exactly and fast: elimination, a price for memory, and an ILP over the little that is left.

1. Min-plus elimination gives the optimum without the memory row. If it fits, it is the answer.
2. Else a multiplier on the memory row gives a bound L(λ) and a solution that fits (`lagrangian`).
3. Min-marginals at λ forbid whatever is in no better solution (`min_marginals`); exact reductions, labels and an ILP
   over counts of equal parts (`presolve`, `remaining`) solve the rest (`low_treewidth`).

Equal problems get equal solutions, unless time runs out. `Search(solver="ilp")` hands the whole problem to the ILP, as
the reference. Where a graph is too wide for elimination, neighbourhoods of it are not (`neighbourhoods`), and give the
ILP a start.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import numpy as np

from autopar.errors import CutOffError, InfeasibleError, PlanError, TimeLimitError
from autopar.solver.bounds.high_treewidth import EXPENSIVE_WORK, Wide
from autopar.solver.bounds.neighbourhoods import NARROW, good_solution, separators
from autopar.solver.deadline import after, grace, is_over, nothing_found, seconds_until
from autopar.solver.elimination.bucket_elimination import CHEAP_WORK, Elimination, narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate, optimum
from autopar.solver.ilp import IlpResult, solve_ilp
from autopar.solver.infeasibility import MemoryLimitError, describe_conflict
from autopar.solver.lagrangian import (
    LeastByElimination,
    Point,
    Relaxation,
    Visited,
    is_closed,
    point,
    priced,
)
from autopar.solver.low_treewidth import (
    COLD,
    EXACT,
    ILP_PAIRS,
    SHRUNK,
    TOLERANCE,
    UNPROVEN,
    Start,
    Tolerances,
    best_bound,
    by_elimination,
    num_choices,
    solution_of,
    warn,
)
from autopar.solver.prepared import Prepared
from autopar.solver.presolve.reduction import prune, reduce_problem, with_fixed
from autopar.solver.problem import Problem, Solution

SEARCHING = 0.25  # of the time goes to a good solution if the treewidth is too high for elimination
ILP_ROUNDING = 1e-5  # of the seconds: what the ILP's whole numbers may leave open
GOOD_START = 0.002  # how far from the best neighbourhoods are solved
FIXED_GAP = 5e-4  # of the seconds, if a smaller gap is expensive
NEAR = 2e-3  # of the seconds: a bound so near decides most strategies
PRICED_NEAR = 1e-4  # the same under a limit, where prices are yet to be found
WORK_PER_S = 300_000_000  # entries of an elimination that are surely computed in a second
FAST_WORK_PER_S = 1_000_000_000  # entries that are computed in a second at best
FIRST_EVALUATIONS = 3  # of an elimination, until choices within a limit are found


def solve(
    problem: Problem,
    *,
    solver: Literal["auto", "ilp"] = "auto",
    time_limit: float = 120.0,
    gap: float = 0.0,
    tolerances: Tolerances = EXACT,
) -> Solution:
    """Return the best choice per node, with a lower bound on what any choice costs.

    Without a memory limit and at low treewidth the solution is the optimum. Otherwise it is proven to be within `gap`
    (a share of its seconds) of the optimum, or within `tolerances` if a smaller gap is expensive.

    After `time_limit` seconds the best solution found so far is returned with its bound, and a warning is given;
    what has begun is broken off a moment later (`deadline.grace`).
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
    return solve_prepared(
        Prepared.of(problem, deadline), time_limit=seconds_until(deadline), gap=gap, tolerances=tolerances
    )


def solve_prepared(
    prepared: Prepared,
    *,
    time_limit: float = 120.0,
    gap: float = 0.0,
    price: float = 0.0,
    tolerances: Tolerances = EXACT,
) -> Solution:
    """Solve like `solve`, from a prepared problem.

    `price` is a memory price in seconds per byte near that of the answer, if one is known: it shortens the search.
    """
    try:
        solution = _by_reduction(
            prepared, after(time_limit), gap, only_narrow=False, price=price, tolerances=tolerances
        )
    finally:
        prepared.visited.forget()
    assert solution is not None
    return solution


def solve_narrow(
    prepared: Prepared, time_limit: float = 120.0, gap: float = 0.0, tolerances: Tolerances = EXACT, price: float = 0.0
) -> Solution | None:
    """Solve like `solve_prepared`, but return None after little work if treewidth is too high, or time too short.

    The tables of the last price stay with what was prepared, for `FixingSearch`.
    """
    return _by_reduction(prepared, after(time_limit), gap, only_narrow=True, price=price, tolerances=tolerances)


def bound_at(prepared: Prepared, price: float, deadline: float) -> float:
    """Return the seconds that no choices within the limit go below, by one evaluation at a price of memory, in seconds
    per byte.

    It is -inf if the treewidth is too high for that, or the time too short.
    """
    budget, elimination = prepared.smaller.budget, prepared.elimination
    if budget is None or elimination is None or is_wide(elimination):
        return -math.inf
    try:
        least = LeastByElimination(prepared.smaller, elimination, prepared.tables, deadline, prepared.visited)
        reached, visited = least(price)
        return priced(reached, price, budget, visited).bound
    except TimeLimitError:
        return -math.inf


def _by_reduction(
    prepared: Prepared,
    deadline: float,
    gap: float,
    only_narrow: bool,
    price: float = 0.0,
    tolerances: Tolerances = EXACT,
) -> Solution | None:
    """Solve the presolved problem, and extend its solution to the original one."""
    problem = prepared.problem
    ready = prepared.tables, prepared.elimination, prepared.visited
    try:
        solution = _solve_pruned(prepared.smaller, deadline, gap, only_narrow, price, tolerances, ready)
    except MemoryLimitError:
        raise MemoryLimitError(problem, deadline) from None  # with the pins that were pruned away
    except InfeasibleError:
        raise InfeasibleError(describe_conflict(problem, deadline)) from None
    if solution is None:
        return None
    choices = prepared.extend(solution.choices)
    seconds = problem.seconds_of(choices)  # the same sum in another order: it may round differently
    bound = seconds if solution.gap == 0 else min(solution.bound, seconds)
    smaller = tuple(map(prepared.extend, solution.smaller))
    return replace(solution, choices=choices, seconds=seconds, bound=bound, smaller=smaller)


def _solve_pruned(
    problem: Problem,
    deadline: float,
    gap: float,
    only_narrow: bool,
    price: float = 0.0,
    tolerances: Tolerances = EXACT,
    ready: tuple[Tables, Elimination | None, Visited] | None = None,
) -> Solution | None:
    """`ready` has the tables of the problem, its elimination, and what that found, where these are known."""
    if ready is None:
        tables = Tables(problem)
        ready = tables, narrow_elimination(problem, tables), Visited()
    tables, elimination, visited = ready
    if elimination is None or is_wide(elimination) or _is_too_late(problem, elimination, deadline, len(visited.points)):
        return None if only_narrow else _by_relaxation(problem, deadline, gap, tolerances)
    return by_elimination(problem, tables, elimination, deadline, gap, price, tolerances=tolerances, visited=visited)


def is_wide(elimination: Elimination | None) -> bool:
    """Return whether messages take less work than an elimination; also true if treewidth is too high for one."""
    return elimination is None or elimination.work > EXPENSIVE_WORK


def _is_too_late(problem: Problem, elimination: Elimination, deadline: float, start_there: int) -> bool:
    """Return whether an expensive elimination cannot find choices by the deadline.

    `start_there` is the number of its evaluations so far.
    """
    evaluations = max(1 if problem.budget is None else FIRST_EVALUATIONS - start_there, 1)
    left = seconds_until(deadline) + grace()
    return elimination.work > CHEAP_WORK and evaluations * elimination.work > FAST_WORK_PER_S * left


def _by_relaxation(
    problem: Problem, deadline: float, gap: float, tolerances: Tolerances, begun: Wide | None = None
) -> Solution:
    """Solve at high treewidth: a bound by messages decides most strategies; the rest has lower treewidth.

    Without a limit a bound that is near is tried first: the last sweeps gain little, and are often not needed.
    """
    searching = deadline - SEARCHING * seconds_until(deadline)
    high = begun or Wide(problem, searching, NEAR if problem.budget is None else PRICED_NEAR)
    relaxed = _best_relaxed(problem, high, searching, tolerances)
    if relaxed is None:
        return _by_expensive_search(problem, None, deadline, gap, tolerances)
    best, price = relaxed.incumbent, relaxed.multiplier
    if price > 0 and relaxed.bound >= tolerances.cutoff:
        raise CutOffError(relaxed.bound)
    if is_closed(best.seconds, relaxed.bound, max(TOLERANCE, gap, tolerances.expensive if price else 0.0)):
        return solution_of(best, relaxed.bound, "relaxation", price)
    # Excesses carry the rounding of long sums; a strategy too many does no harm.
    try:
        most = best.seconds + TOLERANCE * abs(best.seconds)
        (left,) = high.within(most + price * (problem.budget or 0), price)
    except TimeLimitError:
        left = None
    if left is None or is_over(searching):
        warn(best.seconds, relaxed.bound)
        return solution_of(best, relaxed.bound, "relaxation", price)
    is_smaller = num_choices(left.problem) <= SHRUNK * num_choices(problem)
    if problem.budget is None and high.near and not is_smaller:
        high.near = 0.0
        return _by_relaxation(problem, deadline, gap, tolerances, high)
    if is_smaller:
        found = _solve_pruned(
            left.problem, deadline, gap, only_narrow=False, tolerances=replace(tolerances, cutoff=math.inf)
        )
        assert found is not None
        solution = found
    elif problem.budget is not None and sum(edge.seconds.size for edge in left.problem.edges) > ILP_PAIRS:
        warn(best.seconds, relaxed.bound, f"the graph is too wide for an ILP {UNPROVEN}")
        return solution_of(best, relaxed.bound, "relaxation", price)
    else:
        start_there = replace(relaxed, incumbent=point(left.problem, left.restrict(best.choices)))
        solution = _by_expensive_search(left.problem, start_there, deadline, gap, tolerances)
    exact = point(problem, left.extend(solution.choices))
    best = min(best, exact, key=lambda each: each.seconds)
    # What is left out costs more than the best of before, and so than this.
    bound = min(max(left.constant + solution.bound, relaxed.bound), best.seconds)
    return solution_of(best, bound, f"relaxation, {solution.solver}", solution.multiplier or price)


def _best_relaxed(problem: Problem, high: Wide, deadline: float, tolerances: Tolerances) -> Relaxation | None:
    """Return the best bound of a price, and the best visited solution; None if there is none."""
    start, free = COLD, -math.inf
    if problem.budget is not None:
        start, free = _fixed_start(problem, high, deadline, tolerances)
    try:
        return best_bound(problem, high.least, lambda: _smallest_by_relaxation(problem, deadline), deadline, start)
    except TimeLimitError:
        if start.incumbent is None:
            raise
        return Relaxation(0.0, free, start.incumbent)


def _fixed_start(problem: Problem, high: Wide, deadline: float, tolerances: Tolerances) -> tuple[Start, float]:
    """Return a price of memory and a solution that fits: the optimum given nodes fixed as without a limit.

    Also the bound without a limit.
    """
    bound, free = high.least(0.0)
    if free is None or problem.fits(free.num_bytes):
        return COLD, bound
    fixed = {node: free.choices[node] for node in separators(problem, NARROW)}
    found = _narrow_solution(
        with_fixed(problem, fixed), deadline, Tolerances(max(tolerances.expensive, FIXED_GAP), math.inf)
    )
    if found is None:
        return COLD, bound
    return Start(found.multiplier, point(problem, found.choices)), bound


def _by_expensive_search(
    problem: Problem, relaxed: Relaxation | None, deadline: float, gap: float, tolerances: Tolerances
) -> Solution:
    """Solve if the treewidth stays high: a long elimination if there is time for one, or the ILP from what is known."""
    tables = Tables(problem)
    elimination = narrow_elimination(problem, tables)
    if elimination is not None and elimination.work < WORK_PER_S * seconds_until(deadline):
        return by_elimination(problem, tables, elimination, deadline, gap, tolerances=tolerances)
    return _by_reduced_ilp(problem, deadline, gap, relaxed)


def _smallest_by_relaxation(problem: Problem, deadline: float) -> Point | None:
    """Return the choices that fit, of few bytes; None where none were found. Raises MemoryLimitError where there are
    none.
    """
    assert problem.budget is not None
    least, found = Wide(problem.in_bytes(), deadline).least(0.0)
    if found is not None and problem.fits(problem.bytes_of(found.choices)):
        return point(problem, found.choices)
    if least > problem.budget * (1 + TOLERANCE):
        raise MemoryLimitError(problem, deadline)
    return None


def smallest_bytes(problem: Problem, time_limit: float = 120.0) -> int:
    """Return the least bytes of any choice that avoids what is forbidden, exactly; InfeasibleError if there is none."""
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


def _solve_remaining(problem: Problem, deadline: float, incumbent: Point | None = None, gap: float = 0.0) -> IlpResult:
    """Return the ILP on what exact reductions leave of a problem."""
    reduction = reduce_problem(problem)
    if reduction.constant == np.inf:
        return IlpResult(None, np.inf, "infeasible")
    hint = reduction.restrict(incumbent.choices) if incumbent else None
    tolerance = max(TOLERANCE / 2, gap) * abs(incumbent.seconds) if incumbent else 0.0
    result = solve_ilp(reduction.problem, seconds_until(deadline), hint, tolerance=tolerance)
    choices = reduction.extend(result.choices) if result.choices is not None else None
    return IlpResult(choices, reduction.constant + result.bound, result.status)


def _by_reduced_ilp(problem: Problem, deadline: float, gap: float, relaxed: Relaxation | None = None) -> Solution:
    """Solve without elimination: the ILP from a good solution, that of neighbourhoods if none is known."""
    if relaxed is None:
        searching = deadline - (1 - SEARCHING) * seconds_until(deadline)
        start = good_solution(problem, _narrow_point, searching)
    else:
        start = relaxed.incumbent
    result = _solve_remaining(problem, deadline, start, gap)
    if start is None:
        return _from_ilp(problem, result, "reduction + ilp", deadline)
    if result.status == "infeasible":  # below the solution that is there, up to the tolerance
        return solution_of(start, start.seconds, "neighbourhoods + ilp")
    found = start if result.choices is None else min(start, point(problem, result.choices), key=lambda p: p.seconds)
    bound = max(result.bound, _sum_of_least(problem), -math.inf if relaxed is None else relaxed.bound)
    if not is_closed(found.seconds, bound, max(TOLERANCE, gap, ILP_ROUNDING)):
        warn(found.seconds, bound)
    return solution_of(found, bound, "neighbourhoods + ilp")


def _narrow_solution(problem: Problem, deadline: float, tolerances: Tolerances = EXACT) -> Solution | None:
    """Return a good solution of a part of a problem of high treewidth; None if there is none."""
    if problem.forbidden_node is not None:
        return None  # a fixed strategy is forbidden
    pruned = prune(problem)
    tables = Tables(pruned.problem)
    elimination = narrow_elimination(pruned.problem, tables)
    if elimination is None:
        return None
    try:
        solution = by_elimination(pruned.problem, tables, elimination, deadline, GOOD_START, tolerances=tolerances)
    except (InfeasibleError, TimeLimitError):
        return None
    return replace(solution, choices=pruned.extend(solution.choices), smaller=())


def _narrow_point(problem: Problem, deadline: float) -> Point | None:
    found = _narrow_solution(problem, deadline)
    return None if found is None else point(problem, found.choices)


def _sum_of_least(problem: Problem) -> float:
    """Return a bound that needs no search: every node and edge at its least."""
    return sum(float(part.seconds.min()) for part in (*problem.nodes, *problem.edges))


def _from_ilp(problem: Problem, result: IlpResult, solver: str, deadline: float) -> Solution:
    if result.status == "infeasible":
        with suppress(TimeLimitError):
            smallest_bytes(problem, seconds_until(deadline))  # raises where the pins alone contradict each other
        raise MemoryLimitError(problem, deadline)
    if result.choices is None:
        raise TimeLimitError(nothing_found())
    solution = solution_of(point(problem, result.choices), result.bound, solver)
    if result.status == "timeout":
        warn(solution.seconds, solution.bound)
    return solution
