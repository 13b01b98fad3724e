"""Solve one problem, with a memory row or without: the entry to the search for those who have a single problem.

Equal problems get equal solutions, unless time runs out. `solver="ilp"` hands the whole problem to the plain ILP, as
the reference.
"""

from __future__ import annotations

import math
from typing import Literal

from autopar.console.units import format_bytes
from autopar.errors import InfeasibleError, PlanError, TimeLimitError
from autopar.solver.deadline import after, nothing_found, seconds_until
from autopar.solver.ilp import solve_ilp
from autopar.solver.infeasibility import describe_conflict, is_feasible
from autopar.solver.oracles import lower_bound
from autopar.solver.problem import Problem, Solution
from autopar.solver.search import Stated, search
from autopar.solver.tolerances import ROUNDING, Tolerances, is_closed, warn_unproven

ILP_ROUNDING = 1e-5  # relative seconds that the ILP's integrality tolerance may leave open


def solve(
    problem: Problem,
    *,
    solver: Literal["auto", "ilp"] = "auto",
    time_limit: float = 120.0,
    gap: float = 0.0,
) -> Solution:
    """Return the best choice per node, with a lower bound on what any choice costs.

    The solution is proven to be within `gap` (a share of its seconds) of the optimum. After `time_limit` seconds the
    best solution found so far is returned with its bound, and a warning is given; what has begun is broken off a moment
    later (`deadline.grace`).

    Raises InfeasibleError when the pins contradict each other or no choice fits the memory limit, and TimeLimitError
    when time runs out before any solution is found.
    """
    if solver not in ("auto", "ilp"):
        raise PlanError(f"solver {solver!r} is not known; use 'auto' or 'ilp'.")
    deadline = after(time_limit)
    if problem.forbidden_node is not None:
        raise InfeasibleError(describe_conflict(problem, deadline))
    if solver == "ilp":
        result = solve_ilp(problem, seconds_until(deadline))
        choices, bound, name, multiplier = result.choices, result.bound, "ilp", 0.0
        if result.status == "infeasible":
            bound = math.inf
    else:
        found = search(Stated((problem,)), deadline, Tolerances(gap))
        choices, bound, name, multiplier = found.choices, found.bound, found.solver, found.prices[0]
    if choices is None and bound == math.inf:
        if problem.budget is None or not is_feasible(problem):
            raise InfeasibleError(describe_conflict(problem, deadline))
        least = max(round(lower_bound(problem.in_bytes(), 0.0)), problem.budget + 1)
        raise InfeasibleError(
            f"the memory limit is {format_bytes(problem.budget)} ({problem.budget} bytes), but every choice needs at "
            f"least {format_bytes(least)} ({least} bytes). Raise the limit."
        )
    if choices is None:
        raise TimeLimitError(nothing_found())
    seconds, num_bytes = problem.cost_of(choices)
    bound = seconds if is_closed(seconds, bound, ROUNDING) else min(bound, seconds)
    if not is_closed(seconds, bound, max(gap, ILP_ROUNDING if name == "ilp" else ROUNDING)):
        warn_unproven(seconds, bound)
    return Solution(choices, seconds, num_bytes, bound, name, multiplier)
