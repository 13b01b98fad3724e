"""Counting ILP over the steps of an elimination: it counts how often each choice is made, with equal layers as one.

Elimination makes a tree of buckets, and equal subtrees of it share their step (`elimination`). It makes no difference
which of them takes which choice, so it is sufficient to count. A bucket's bag, with all that is folded into it, has a
folded label w (`labels`). Let y_s(w) be the number of buckets of step s with w, and x what w gives the bag's
neighbours:

    min   Σ seconds_s(w) y_s(w)
    s.t.  Σ_{w at a root} y_s(w) = number of roots of step s
          Σ_{w with x} y_c(w) = Σ_{parents s, w that give x} y_s(w)      for each x, and each child step c that is apart
          Σ bytes_s(w) y_s(w) ≤ budget                                   for each memory row

The part below a bucket depends on its neighbours' choices alone, so any numbers that satisfy this can be handed down
from the roots. Choices whose reduced cost (`min_marginals`) at the memory price exceeds the margin have no variable. If
there is much to count, neither have those that other prices exclude.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopar.solver.deadline import check, seconds_until
from autopar.solver.elimination.min_marginals import children_of
from autopar.solver.ilp import solved
from autopar.solver.remaining.folded_labels import FoldedLabels, folded_labels_of, occurrences
from autopar.solver.remaining.remaining_choices import Counted, RemainingProblem, TooManyChoicesError

MAX_VARIABLES = 300_000  # beyond, the ILP takes minutes
FIRST_EFFORT = 0.1  # CP-SAT's deterministic seconds: mostly the best is found in that, and is yet to be proven
MIN_TOLERANCE = 1e-10  # of the limit: what the ILP tells apart


@dataclass(frozen=True, slots=True)
class _Step:
    """Folded labels of a step that stays apart, with a variable that counts each, and the number of its buckets."""

    labels: FoldedLabels
    variables: list[cp_model.IntVar]
    count: int


def best_counts(remaining_problem: RemainingProblem, tolerance: float, effort: float = math.inf) -> Counted:
    """Return the choices of least seconds within all budgets, if they cost no more than the limit, up to a tolerance.

    The ILP ends with what it has after so much `effort`, which is counted in CP-SAT's deterministic seconds: the answer
    is the same on every machine. Where little is to be counted, a short search comes first: what it finds leaves less.
    Raises TooManyChoicesError.
    """
    if math.isinf(effort) and not remaining_problem.is_small:
        remaining_problem = remaining_problem.sharpened()
    if effort <= FIRST_EFFORT or not remaining_problem.is_small:
        return _Counting(remaining_problem).solve(tolerance, effort)
    first = _Counting(remaining_problem).solve(tolerance, FIRST_EFFORT)
    if first.is_proven or first.choices is None:
        return first if first.is_proven else _Counting(remaining_problem).solve(tolerance, effort)
    incumbent = remaining_problem.seconds_of(first.choices)
    found = _Counting(remaining_problem.below(min(incumbent, remaining_problem.limit))).solve(tolerance, effort)
    is_better = found.choices is not None and remaining_problem.seconds_of(found.choices) < incumbent
    bound = max(first.bound, found.bound)
    return Counted(found.choices if is_better else first.choices, bound, found.is_proven)


class _Counting:
    def __init__(self, remaining_problem: RemainingProblem) -> None:
        self.remaining_problem = remaining_problem
        self.elimination, self.limit = remaining_problem.elimination, remaining_problem.limit
        self.model = cp_model.CpModel()
        self.labels: list[FoldedLabels] = []
        self.steps: dict[int, _Step] = {}
        """Steps that stay apart, by their number."""

    def solve(self, tolerance: float, effort: float) -> Counted:
        if self.remaining_problem.margin < 0 or not self._state():
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
        solver.parameters.max_time_in_seconds = seconds_until(self.remaining_problem.deadline)
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
        if not all(len(entries) for entries, _ in self.remaining_problem.choices):
            return False
        self.labels = folded_labels_of(self.remaining_problem)
        counts = occurrences(self.remaining_problem, self.labels)
        if sum(len(each) for each, count in zip(self.labels, counts, strict=True) if count) > MAX_VARIABLES:
            raise TooManyChoicesError
        for step, (labels, count) in enumerate(zip(self.labels, counts, strict=True)):
            if count:
                check(self.remaining_problem.deadline)
                variables = [self.model.new_int_var(0, count, "") for _ in range(len(labels))]
                self.steps[step] = _Step(labels, variables, count)
        if not all(each.variables for each in self.steps.values()):
            return False
        for step, count in self.remaining_problem.roots.items():
            self.model.add(cp_model.LinearExpr.sum(self.steps[step].variables) == count)
        for step, requested in self._requested().items():
            given: dict[tuple[int, ...], list[cp_model.IntVar]] = defaultdict(list)
            child = self.steps[step]
            for entry, variable in zip(child.labels.entries.tolist(), child.variables, strict=True):
                given[tuple(entry[1:])].append(variable)
            for around in given.keys() | requested.keys():
                taken = cp_model.LinearExpr.sum(given.get(around, []))
                self.model.add(taken == cp_model.LinearExpr.sum(requested.get(around, [])))
        return True

    def _requested(self) -> dict[int, dict[tuple[int, ...], list[cp_model.IntVar]]]:
        """Child step → its neighbours' choices → the variables of parents that give them, as often as they do."""
        requested: dict[int, dict[tuple[int, ...], list[cp_model.IntVar]]] = {}
        for parent in self.steps.values():
            for child, axes in parent.labels.apart:
                of_child = requested.setdefault(child, defaultdict(list))
                places = parent.labels.entries[:, list(axes)].tolist()
                for around, variable in zip(places, parent.variables, strict=True):
                    of_child[tuple(around)].append(variable)
        return requested

    def _minimise(self, tolerance: float) -> tuple[float, float]:
        """Set the objective and the limits; returns what every solution costs, and the unit of the rest, in seconds."""
        num_buckets = len(self.elimination.buckets)
        unit = max(tolerance, MIN_TOLERANCE * abs(self.limit)) / (4 * num_buckets) or 1.0
        constant = 0.0
        costs: list[int] = []
        for each in self.steps.values():
            least = float(each.labels.seconds.min())
            constant += least * each.count
            # Rounded down, so that the bound holds for the true seconds too.
            costs += np.floor((each.labels.seconds - least) / unit).astype(np.int64).tolist()
        variables = [variable for each in self.steps.values() for variable in each.variables]
        self.model.minimize(cp_model.LinearExpr.weighted_sum(variables, costs))
        for row, budget in enumerate(self.remaining_problem.budgets):
            if budget is not None:
                self._limit_memory(row, budget, variables)
        return constant, unit

    def _limit_memory(self, row: int, budget: int, variables: list[cp_model.IntVar]) -> None:
        bytes_of = [each.labels.num_bytes[:, row] for each in self.steps.values()]
        least = [int(each.min()) for each in bytes_of]
        row_bytes = [num for each, less in zip(bytes_of, least, strict=True) for num in (each - less).tolist()]
        left = budget - sum(less * each.count for less, each in zip(least, self.steps.values(), strict=True))
        common = math.gcd(*row_bytes) or 1
        whole = cp_model.LinearExpr.weighted_sum(variables, [each // common for each in row_bytes])
        self.model.add(whole <= left // common)

    def _handed_out(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """Return a choice per node.

        Each bucket takes one of the labels counted for its neighbours' choices, or the one in its parent's label.
        """
        left: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for step, each in self.steps.items():
            left[step] = defaultdict(list)
            for way, (entry, variable) in enumerate(zip(each.labels.entries.tolist(), each.variables, strict=True)):
                left[step][tuple(entry[1:])] += [way] * solver.value(variable)
        buckets, children = self.elimination.buckets, children_of(self.elimination)
        taken: dict[int, int] = {}
        chosen: dict[int, int] = {}
        for place in reversed(range(len(buckets))):
            bucket = buckets[place]
            labels = self.labels[bucket.step]
            if place not in taken:
                taken[place] = left[bucket.step][tuple(chosen[member] for member in bucket.bag[1:])].pop()
            chosen[bucket.bag[0]] = int(labels.entries[taken[place], 0])
            below = [(child, int(way[taken[place]])) for child, way in labels.below]
            taken |= self.remaining_problem.handed_down(place, children[place], below)
        return tuple(chosen[node] for node in range(len(chosen)))
