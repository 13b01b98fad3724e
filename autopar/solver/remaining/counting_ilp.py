"""Counting ILP over the steps of an elimination: it counts how often each choice is made, with equal layers as one.

Elimination makes a tree of buckets, and equal subtrees of it share their step (`elimination`). It makes no difference
which of them takes which choice, so it is sufficient to count. Let y_s(w) be the number of buckets of step s whose bag
takes the choices w, and x what w gives the bag's neighbours:

    min   Σ seconds_s(w) y_s(w)
    s.t.  Σ_{w at a root} y_s(w) = number of roots of step s
          Σ_{w with x} y_c(w) = Σ_{parents s, w that give x} y_s(w)      for each x, and each child step c
          Σ bytes_s(w) y_s(w) ≤ budget                                   for each memory row

The part below a bucket depends on its neighbours' choices alone, so any numbers that satisfy this can be handed down
from the roots. Choices whose reduced cost (`min_marginals`) at the memory price exceeds the margin have no variable.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopar.solver.deadline import NEVER, check, seconds_until
from autopar.solver.ilp import SMALL_ILP, repeatable_solver, solved
from autopar.solver.problem import Floats, Integers
from autopar.solver.remaining.remaining_choices import Counted, RemainingProblem, TooManyChoicesError
from autopar.solver.remaining.scip import solve_by_scip
from autopar.solver.tolerances import EFFORT


@dataclass(frozen=True, slots=True)
class _Step:
    """Choices of the bags of a step that no other choice dominates, with a variable that counts each."""

    entries: Integers
    """Choices of the bag, a row each."""
    seconds: Floats
    num_bytes: Integers
    """A row for each choice, a column for each memory row."""
    children: list[tuple[int, tuple[int, ...]]]
    """Steps of the children, and the axes of the bag that their neighbours are on."""
    variables: list[cp_model.IntVar]
    count: int
    """Number of buckets."""


def best_counts(
    remaining_problem: RemainingProblem,
    tolerance: float,
    deadline: float = NEVER,
    known: Sequence[int] | None = None,
    until: float = 0.0,
) -> Counted:
    """Return the choices of least seconds within all budgets, if they cost no more than the limit, up to a tolerance.

    CP-SAT ends with what it has after `EFFORT`, which is counted in its deterministic seconds: the answer is the same
    on every machine. It begins with `known` choices, if there are some. SCIP goes on with what that leaves undecided,
    `until` a moment. Raises TooManyChoicesError.
    """
    return _Counting(remaining_problem).solve(tolerance, known, deadline, until)


class _Counting:
    def __init__(self, remaining_problem: RemainingProblem) -> None:
        self.remaining_problem = remaining_problem
        self.elimination, self.limit = remaining_problem.elimination, remaining_problem.limit
        self.model = cp_model.CpModel()
        self.steps: list[_Step] = []

    def solve(self, tolerance: float, known: Sequence[int] | None, deadline: float, until: float = 0.0) -> Counted:
        if self.remaining_problem.margin < 0 or not self._state():
            return Counted(None, self.limit, True)
        if not self.elimination.buckets:
            return Counted((), min(0.0, self.limit), True)
        constant, unit = self._minimise(tolerance)
        self._begin_with(known)
        gap = max(0.999, tolerance / 2 / unit)
        solver = repeatable_solver(gap)
        # Counts have neither symmetries nor much to probe for: looking takes longer than the search.
        solver.parameters.symmetry_level = 0
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.max_presolve_iterations = 1
        solver.parameters.max_time_in_seconds = seconds_until(deadline)
        solver.parameters.max_deterministic_time = EFFORT
        status = solved(solver, self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        if status == cp_model.INFEASIBLE:
            return Counted(None, self.limit, True)
        is_decided = status == cp_model.OPTIMAL
        values = None if status == cp_model.UNKNOWN else tuple(solver.response_proto.solution)
        least = -math.inf if values is None else solver.best_objective_bound
        if not is_decided and until:
            found = solve_by_scip(self.model, gap, until, values or ())
            is_decided, least = found.status != "timeout", max(least, found.bound)
            values = found.choices or values
        choices, bound = None if values is None else self._handed_out(values), min(constant + least * unit, self.limit)
        return Counted(choices, bound, is_decided or bound >= self.limit)

    def _state(self) -> bool:
        """Make the variables and say how they hang together; False where nothing is left for some bucket."""
        remaining_problem = self.remaining_problem
        if sum(map(len, remaining_problem.choices)) > SMALL_ILP:
            raise TooManyChoicesError
        counts = Counter(bucket.step for bucket in self.elimination.buckets)
        for step, entries in enumerate(remaining_problem.choices):
            if not len(entries):
                return False
            check(remaining_problem.deadline)
            seconds, num_bytes = remaining_problem.own(step)
            children = remaining_problem.messages(step)
            kept = np.arange(len(entries)) if children else _undominated(entries, seconds, num_bytes.T)
            variables = [self.model.new_int_var(0, counts[step], "") for _ in kept]
            here = entries[kept], seconds[kept], num_bytes.T[kept], children, variables, counts[step]
            self.steps.append(_Step(*here))
        for step, count in remaining_problem.roots.items():
            self.model.add(cp_model.LinearExpr.sum(self.steps[step].variables) == count)
        for step, requested in self._requested().items():
            given: dict[tuple[int, ...], list[cp_model.IntVar]] = defaultdict(list)
            child = self.steps[step]
            for entry, variable in zip(child.entries.tolist(), child.variables, strict=True):
                given[tuple(entry[1:])].append(variable)
            for around in given.keys() | requested.keys():
                taken = cp_model.LinearExpr.sum(given.get(around, []))
                self.model.add(taken == cp_model.LinearExpr.sum(requested.get(around, [])))
        return True

    def _requested(self) -> dict[int, dict[tuple[int, ...], list[cp_model.IntVar]]]:
        """Map child steps to their neighbours' choices, and these to the parents' variables that give them, with
        repetition.
        """
        requested: dict[int, dict[tuple[int, ...], list[cp_model.IntVar]]] = {}
        for parent in self.steps:
            for child, axes in parent.children:
                of_child = requested.setdefault(child, defaultdict(list))
                places = parent.entries[:, list(axes)].tolist()
                for around, variable in zip(places, parent.variables, strict=True):
                    of_child[tuple(around)].append(variable)
        return requested

    def _minimise(self, tolerance: float) -> tuple[float, float]:
        """Set the objective and the limits; returns what every solution costs, and the unit of the rest, in seconds."""
        num_buckets = len(self.elimination.buckets)
        unit = tolerance / (4 * num_buckets) or 1.0
        constant = 0.0
        costs: list[int] = []
        for each in self.steps:
            least = float(each.seconds.min())
            constant += least * each.count
            # Rounded down, so that the bound holds for the true seconds too.
            costs += np.floor((each.seconds - least) / unit).astype(np.int64).tolist()
        variables = [variable for each in self.steps for variable in each.variables]
        self.model.minimize(cp_model.LinearExpr.weighted_sum(variables, costs))
        for row, budget in enumerate(self.remaining_problem.budgets):
            if budget is not None:
                self._limit_memory(row, budget, variables)
        return constant, unit

    def _begin_with(self, known: Sequence[int] | None) -> None:
        """Hint at known choices, if all of them are left."""
        if known is None:
            return
        places = [{tuple(entry): place for place, entry in enumerate(each.entries.tolist())} for each in self.steps]
        counts = [[0] * len(each.variables) for each in self.steps]
        for bucket in self.elimination.buckets:
            place = places[bucket.step].get(tuple([known[member] for member in bucket.bag]))
            if place is None:
                return
            counts[bucket.step][place] += 1
        for each, counted in zip(self.steps, counts, strict=True):
            for variable, count in zip(each.variables, counted, strict=True):
                self.model.add_hint(variable, count)

    def _limit_memory(self, row: int, budget: int, variables: list[cp_model.IntVar]) -> None:
        bytes_of = [each.num_bytes[:, row] for each in self.steps]
        least = [int(each.min()) for each in bytes_of]
        row_bytes = [num for each, less in zip(bytes_of, least, strict=True) for num in (each - less).tolist()]
        left = budget - sum(less * each.count for less, each in zip(least, self.steps, strict=True))
        common = math.gcd(*row_bytes) or 1
        whole = cp_model.LinearExpr.weighted_sum(variables, [each // common for each in row_bytes])
        self.model.add(whole <= left // common)

    def _handed_out(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return a choice per node: each bucket takes one of the choices counted for its neighbours'."""
        left: list[dict[tuple[int, ...], list[int]]] = []
        for each in self.steps:
            here: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for entry, variable in zip(each.entries.tolist(), each.variables, strict=True):
                here[tuple(entry[1:])] += [entry[0]] * values[variable.index]
            left.append(here)
        chosen: dict[int, int] = {}
        for bucket in reversed(self.elimination.buckets):
            node, *neighbours = bucket.bag
            chosen[node] = left[bucket.step][tuple(chosen[other] for other in neighbours)].pop()
        return tuple(chosen[node] for node in range(len(chosen)))


def _undominated(entries: Integers, seconds: Floats, num_bytes: Integers) -> Integers:
    """Return the positions of choices of a bag without children that cost less somewhere than others of its neighbours.

    Only the eliminated node's own choice may differ, which nothing else depends on.
    """
    order = np.lexsort((seconds, *entries[:, :0:-1].T))
    kept: list[int] = []
    group: tuple[int, ...] | None = None
    front: list[Integers] = []
    for place in order.tolist():
        around = tuple(entries[place, 1:].tolist())
        if around != group:
            group, front = around, []
        own = num_bytes[place]
        if not any((other <= own).all() for other in front):
            front.append(own)
            kept.append(place)
    return np.sort(np.array(kept, dtype=np.intp))
