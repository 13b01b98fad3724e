"""How often each choice is made: the ILP over the steps of an elimination, in which equal layers are one.

Elimination makes a tree of buckets, and equal subtrees of it share their step (`elimination`). Which of them takes
which choice makes no difference, so it is enough to count. With y_s(b) the number of buckets of step s that take the
choices b of their bag, and x the part of b that is the bag's neighbours:

    min   Σ seconds_s(b) y_s(b)
    s.t.  Σ_{b at a root} y_s(b) = number of roots of step s
          Σ_{b with x} y_c(b) = Σ_{parents s, b that give x} y_s(b)            for each child step c and each x
          Σ bytes_s(b) y_s(b) ≤ budget                                   for each memory row

What is below a bucket depends on its neighbours' choices alone, so any numbers that fulfil this can be handed down from
the roots. Choices whose excess (`min_marginals`) at the price of memory is above what the limit leaves have no
variable.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopar.solver.deadline import check, seconds_until
from autopar.solver.ilp import solved
from autopar.solver.residual.residual import Counted, Residual, TooManyChoicesError

MAX_VARIABLES = 300_000  # beyond, the ILP takes minutes
FIRST_EFFORT = 0.1  # CP-SAT's deterministic seconds: mostly the best is found in that, and is yet to be proven
MIN_TOLERANCE = 1e-10  # of the limit: what the ILP tells apart


@dataclass(slots=True)
class _StepVariables:
    """The choices of a step's bag that may be taken, a row each, with a variable that counts them."""

    entries: np.ndarray
    seconds: np.ndarray
    num_bytes: np.ndarray
    """A row for each memory row."""
    variables: list[cp_model.IntVar]


def best_counts(residual: Residual, tolerance: float, effort: float = math.inf) -> Counted:
    """The choices of least seconds within all budgets, if they cost no more than the limit, up to a tolerance.

    The ILP ends with what it has after so much `effort`, which is counted in CP-SAT's deterministic seconds: the answer
    is the same on every machine. Where little is to be counted, a short search comes first: what it finds leaves less.
    Raises TooManyChoicesError.
    """
    if effort <= FIRST_EFFORT or not residual.is_small:
        return _Counting(residual).solve(tolerance, effort)
    first = _Counting(residual).solve(tolerance, FIRST_EFFORT)
    if first.is_proven or first.choices is None:
        return first if first.is_proven else _Counting(residual).solve(tolerance, effort)
    known = residual.seconds_of(first.choices)
    found = _Counting(residual.below(min(known, residual.limit))).solve(tolerance, effort)
    is_better = found.choices is not None and residual.seconds_of(found.choices) < known
    bound = max(first.bound, found.bound)
    return Counted(found.choices if is_better else first.choices, bound, found.is_proven)


class _Counting:
    def __init__(self, residual: Residual) -> None:
        self.residual = residual
        self.elimination, self.limit = residual.elimination, residual.limit
        self.occurrences = Counter(bucket.step for bucket in self.elimination.buckets)
        self.model = cp_model.CpModel()
        self.steps: list[_StepVariables] = []

    def solve(self, tolerance: float, effort: float) -> Counted:
        if self.residual.margin < 0 or not self._state():
            return Counted(None, self.limit, True)
        if not self.elimination.buckets:
            return Counted((), min(0.0, self.limit), True)
        constant, unit = self._minimise(tolerance)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.random_seed = 0
        # Counts have neither symmetries nor much to probe for: looking takes longer than the search.
        solver.parameters.symmetry_level = 0
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.max_presolve_iterations = 1
        solver.parameters.max_time_in_seconds = seconds_until(self.residual.deadline)
        solver.parameters.max_deterministic_time = effort
        solver.parameters.relative_gap_limit = 0.0
        solver.parameters.absolute_gap_limit = max(0.999, tolerance / 2 / unit)
        status = solved(solver, self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        if status == cp_model.INFEASIBLE:
            return Counted(None, self.limit, True)
        if status == cp_model.UNKNOWN:
            return Counted(None, -math.inf, False)
        bound = min(constant + solver.best_objective_bound * unit, self.limit)
        return Counted(self._handed_out(solver), bound, status == cp_model.OPTIMAL or bound >= self.limit)

    def _state(self) -> bool:
        """Make the variables and say how they hang together; False where nothing is left for some bucket."""
        choices = self.residual.choices
        if not all(len(entries) for entries, _ in choices):
            return False
        if sum(len(entries) for entries, _ in choices) > MAX_VARIABLES:
            raise TooManyChoicesError
        for step, (entries, _) in enumerate(choices):
            check(self.residual.deadline)
            most = self.occurrences[step]
            variables = [self.model.new_int_var(0, most, "") for _ in range(len(entries))]
            self.steps.append(_StepVariables(entries, *self.residual.own(step), variables))
        for step, count in self.residual.roots.items():
            self.model.add(cp_model.LinearExpr.sum(self.steps[step].variables) == count)
        for step, asked in self._asked().items():
            given: dict[tuple[int, ...], list[cp_model.IntVar]] = defaultdict(list)
            for entry, variable in zip(self.steps[step].entries.tolist(), self.steps[step].variables, strict=True):
                given[tuple(entry[1:])].append(variable)
            for around in given.keys() | asked.keys():
                taken = cp_model.LinearExpr.sum(given.get(around, []))
                self.model.add(taken == cp_model.LinearExpr.sum(asked.get(around, [])))
        return True

    def _asked(self) -> dict[int, dict[tuple[int, ...], list[cp_model.IntVar]]]:
        """Child step → its neighbours' choices → the variables of parents that give them, as often as they do."""
        asked: dict[int, dict[tuple[int, ...], list[cp_model.IntVar]]] = {}
        for parent, step in enumerate(self.elimination.steps):
            for table, axes in step.inputs:
                if table < self.elimination.num_tables:
                    continue
                of_child = asked.setdefault(table - self.elimination.num_tables, defaultdict(list))
                places = self.steps[parent].entries[:, list(axes)].tolist()
                for around, variable in zip(places, self.steps[parent].variables, strict=True):
                    of_child[tuple(around)].append(variable)
        return asked

    def _minimise(self, tolerance: float) -> tuple[float, float]:
        """Set the objective and the limits; returns what every solution costs, and the unit of the rest, in seconds."""
        num_buckets = len(self.elimination.buckets)
        unit = max(tolerance, MIN_TOLERANCE * abs(self.limit)) / (4 * num_buckets) or 1.0
        constant = 0.0
        costs: list[int] = []
        for step, each in enumerate(self.steps):
            least = float(each.seconds.min())
            constant += least * self.occurrences[step]
            # Rounded down, so that the bound holds for the true seconds too.
            costs += np.floor((each.seconds - least) / unit).astype(np.int64).tolist()
        variables = [variable for each in self.steps for variable in each.variables]
        self.model.minimize(cp_model.LinearExpr.weighted_sum(variables, costs))
        for row, budget in enumerate(self.residual.budgets):
            if budget is not None:
                self._limit_memory(row, budget, variables)
        return constant, unit

    def _limit_memory(self, row: int, budget: int, variables: list[cp_model.IntVar]) -> None:
        least = [int(each.num_bytes[row].min()) for each in self.steps]
        held = [
            num for each, less in zip(self.steps, least, strict=True) for num in (each.num_bytes[row] - less).tolist()
        ]
        left = budget - sum(less * self.occurrences[step] for step, less in enumerate(least))
        common = math.gcd(*held) or 1
        whole = cp_model.LinearExpr.weighted_sum(variables, [each // common for each in held])
        self.model.add(whole <= left // common)

    def _handed_out(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """A choice per node: each bucket takes one of those that are counted for its neighbours' choices."""
        left: list[dict[tuple[int, ...], list[int]]] = []
        for each in self.steps:
            of_step: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for entry, variable in zip(each.entries.tolist(), each.variables, strict=True):
                of_step[tuple(entry[1:])] += [entry[0]] * solver.value(variable)
            left.append(of_step)
        chosen: dict[int, int] = {}
        for bucket in reversed(self.elimination.buckets):
            chosen[bucket.bag[0]] = left[bucket.step][tuple(chosen[member] for member in bucket.bag[1:])].pop()
        return tuple(chosen[node] for node in range(len(chosen)))
