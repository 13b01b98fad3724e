"""Branch and bound over linear relaxations (SCIP; Achterberg 2009) of an ILP that CP-SAT leaves undecided.

CP-SAT learns from conflicts, which decides most counts at once. Where conflicts tell little, the relaxation of a branch
bounds what it takes, and equal layers are one number. SCIP computes in floating-point numbers, so its solutions are
checked in whole numbers, and its bounds are lowered by its tolerance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from autopar.solver.deadline import NEVER, seconds_until
from autopar.solver.ilp import BUILT_PER_S, IlpResult, until_interrupted

TOLERANCE = 1e-6  # relative: how far SCIP takes a row to be kept, and a bound to be proven
SCALE = math.sqrt(TOLERANCE)  # share of the largest coefficient that becomes 1: the least stay above TOLERANCE


def solve_by_scip(model: cp_model.CpModel, gap: float, deadline: float, start: Sequence[int] = ()) -> IlpResult:
    """Minimise a model of linear rows by a deadline, from a solution if one is known.

    `gap`, in units of the objective, ends the search early. The choices are values of the variables.
    """
    if len(model.proto.variables) > BUILT_PER_S * seconds_until(deadline):
        return IlpResult(None, -math.inf, "timeout")
    rows = [_row(each.linear) for each in model.proto.constraints]
    solver = pywraplp.Solver.CreateSolver("SCIP")
    assert solver is not None
    variables = [solver.IntVar(*map(float, each.domain), "") for each in model.proto.variables]
    for coefficients, low, high in rows:
        unit = max(SCALE * max(map(abs, coefficients.values()), default=0), 1.0)
        least = low / unit if low > cp_model.INT_MIN else -solver.infinity()
        row = solver.Constraint(least, high / unit if high < cp_model.INT_MAX else solver.infinity())
        for number, coefficient in coefficients.items():
            row.SetCoefficient(variables[number], coefficient / unit)
    objective, costs = solver.Objective(), list(model.proto.objective.coeffs)
    unit = max(map(abs, costs), default=0) * SCALE or 1.0
    for number, cost in zip(list(model.proto.objective.vars), costs, strict=True):
        objective.SetCoefficient(variables[number], cost / unit)
    objective.SetMinimization()
    if start:
        solver.SetHint(variables, list(map(float, start)))
    solver.SetSolverSpecificParametersAsString(f"limits/absgap = {gap / unit}\n")
    if deadline < NEVER:
        solver.SetTimeLimit(max(1, int(1000 * seconds_until(deadline))))
    exactly = pywraplp.MPSolverParameters()
    exactly.SetDoubleParam(exactly.RELATIVE_MIP_GAP, 0.0)
    status = until_interrupted(lambda: solver.Solve(exactly), solver.InterruptSolve)
    if status == pywraplp.Solver.INFEASIBLE:
        return IlpResult(None, math.inf, "infeasible")
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        return IlpResult(None, -math.inf, "timeout")
    bound = objective.BestBound() * unit
    bound -= TOLERANCE * abs(bound)
    values = tuple([round(each.solution_value()) for each in variables])
    sums = [sum(each * values[number] for number, each in coefficients.items()) for coefficients, *_ in rows]
    if any(
        not low <= total <= high for total, (_, low, high) in zip(sums, rows, strict=True)
    ):  # by less than TOLERANCE
        return IlpResult(None, bound, "timeout")
    return IlpResult(values, bound, "optimal" if status == pywraplp.Solver.OPTIMAL else "timeout")


def _row(linear: Any) -> tuple[Counter[int], int, int]:
    """Return the coefficients of variables, and the least and the most that they may add up to."""
    coefficients = Counter[int]()
    for number, coefficient in zip(list(linear.vars), list(linear.coeffs), strict=True):
        coefficients[number] += coefficient
    return coefficients, *linear.domain
