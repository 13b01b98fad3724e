"""The least memory that any plan takes at its fullest moment, and a plan that takes no more.

    min_x max_m bytes_m(x)  =  min_x max_w Σ_m w_m bytes_m(x)  ≥  max_w min_x Σ_m w_m bytes_m(x)      Σ w = 1,  w ≥ 0

Each min over x is a problem without a limit, which elimination solves. The weights of moments that prove most are found
by cutting planes (Kelley 1960): every visited answer gives its bytes at every moment, and the next weights are the best
against all answers so far, a small linear program. The remaining gap is closed by fixing: choices that cost
more than what is open are in no smaller plan, and an ILP with a row for each moment decides over the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.console.units import format_bytes
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import bytes_by_moment
from autopar.costs.space.narrowed import Pins
from autopar.errors import TimeLimitError
from autopar.planning.formulation import Formulation
from autopar.planning.memory_limit.answers import choices_and_modes, row_of
from autopar.planning.memory_limit.moments import MAX_ROWS
from autopar.solver.bounds.prices import MAX_PLANES
from autopar.solver.deadline import NEVER, is_over, seconds_until
from autopar.solver.elimination.bucket_elimination import EXPENSIVE_WORK
from autopar.solver.elimination.min_marginals import ReducedCosts
from autopar.solver.ilp import SMALL_ILP, solve_ilp
from autopar.solver.oracles import EliminationOracle, constant_of
from autopar.solver.presolve.reduced_cost_fixing import remaining_of_each
from autopar.solver.problem import Problem, Solution
from autopar.solver.solve import solve
from autopar.solver.tolerances import EFFORT, without_warnings


@dataclass(frozen=True, slots=True)
class LeastPeak:
    """The choices of the smallest peak that was found, and what no plan is below."""

    choices: tuple[int, ...]
    modes: Mapping[str, str]
    peak_bytes: int
    bound: int
    weights: MemoryRow
    """Moments, with weights, at which no plan takes less on average than the bound."""

    @property
    def is_proven(self) -> bool:
        """True if no plan takes less."""
        return self.peak_bytes <= self.bound

    def __str__(self) -> str:
        least = f"{format_bytes(self.peak_bytes)} ({self.peak_bytes} bytes)"
        if self.is_proven:
            return f"every choice needs at least {least}"
        return f"the least that was found is {least}, and no choice needs less than {format_bytes(self.bound)}"


def least_peak(
    formulation: Formulation,
    pins: Pins,
    modes: Mapping[str, str] | None,
    deadline: float = NEVER,
    sufficient: int = 0,
    is_brief: bool = False,
) -> LeastPeak:
    """Return the plan under pins whose fullest moment is the least full; where a little search proves no plan less
    full.

    Ends early at a plan of at most `sufficient` bytes, and where it is to be brief once no plan can take so little, or
    weights of moments prove no more. Unless the time is over the answer does not depend on how fast the
    machine is. Raises InfeasibleError where the pins contradict each other, and TimeLimitError where the search for a
    first plan takes until the deadline.
    """
    search = _Search(formulation, pins, modes, deadline, sufficient, is_brief)
    search.by_weights()
    if not is_brief:
        search.by_fixing()
    choices, chosen = choices_and_modes(search.points[search.best_point], formulation, modes)
    return LeastPeak(choices, chosen, search.best, min(search.least, search.best), search.weights)


class _Search:
    def __init__(
        self,
        formulation: Formulation,
        pins: Pins,
        modes: Mapping[str, str] | None,
        deadline: float,
        sufficient: int,
        is_brief: bool,
    ) -> None:
        self.formulation, self.pins, self.modes = formulation, pins, modes
        self.deadline, self.sufficient, self.is_brief = deadline, sufficient, is_brief
        self.points: list[tuple[int, ...]] = []
        """Visited choices, of decisions and segments."""
        self.taken: list[np.ndarray] = []
        """Their bytes at every moment."""
        self.moments: list[int] = []
        """Moments that were the fullest of some point."""
        self.best, self.best_point = 2**62, -1
        self.least, self.weights = 0, MemoryRow(())
        """The best bound, and the weights that prove it."""

    def by_weights(self) -> None:
        """Add cutting planes until neither the bound nor the best point improves."""
        weights = MemoryRow(((max(len(self.formulation.memory.lifetimes.calls) - 1, 0), 1),))
        seen: set[MemoryRow] = set()
        while len(seen) < MAX_PLANES and weights not in seen and not self.is_done():
            seen.add(weights)
            try:
                problem = self.formulation.problem(self.pins, weights, None, self.modes).in_bytes()
                solution = _solved(problem, self.deadline)
            except TimeLimitError:
                if not self.points:
                    raise
                return
            bound = int(np.ceil(solution.bound / weights.total - 1e-6))
            if bound > self.least:
                self.least, self.weights = bound, weights
            self.meet_point(solution.choices)
            weights = self.heaviest()

    def by_fixing(self) -> None:
        """Close the gap by fixings and an ILP, with a row for each moment that was the fullest of some point."""
        found: ReducedCosts | None = None
        priced: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        while len(self.moments) <= MAX_ROWS and not self.is_done():
            smaller = self.best - 1
            rows = (self.weights, *(MemoryRow(((moment, 1),)) for moment in self.moments))
            open_bytes = float((smaller - self.least + 1) * self.weights.total)
            try:
                weighted, *stated = self.formulation.problems(self.pins, rows, smaller, self.modes)
                weighted = weighted.in_bytes()
                before, priced = priced, [(edge.ends, edge.seconds.shape) for edge in weighted.edges]
                if found is None or priced != before:  # further rows may state more edges by mode
                    oracle = EliminationOracle.of((weighted,), self.deadline, EXPENSIVE_WORK)
                    found = None if oracle is None else oracle.reduced_costs((0.0,), open_bytes)
            except TimeLimitError:
                return
            if found is None:
                return
            left = remaining_of_each((weighted, *stated), found, open_bytes)
            if math.isinf(constant_of(left)):
                self.least = self.best
                return
            first, *limited = [each.problem for each in left]
            if sum(edge.seconds.size for edge in first.edges) > SMALL_ILP:
                return
            result = solve_ilp(first, EFFORT, rows=limited, repeatable=True)
            if result.status == "infeasible":
                self.least = self.best
            if result.choices is None:
                return
            self.meet_point(left[0].extend(result.choices))

    def heaviest(self) -> MemoryRow:
        """Return the sum of moments, with weights in parts, of which the least that a plan takes is the most."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        assert solver is not None
        scale = float(max(taken.max() for taken in self.taken))
        weights = [solver.NumVar(0.0, 1.0, "") for _ in self.moments]
        least = solver.NumVar(0.0, solver.infinity(), "")
        solver.Add(sum(weights) == 1)
        for taken in self.taken:
            solver.Add(least <= sum(w * (float(taken[m]) / scale) for w, m in zip(weights, self.moments, strict=True)))
        solver.Maximize(least)
        solver.Solve()
        return row_of({moment: each.solution_value() for moment, each in zip(self.moments, weights, strict=True)})

    def is_done(self) -> bool:
        """Return whether the search may stop.

        It has to have visited a point, and the best is proven, small enough or out of time. A brief search also stops
        once no plan can be small enough.
        """
        is_settled = self.best <= max(self.least, self.sufficient) or (self.is_brief and self.least > self.sufficient)
        return bool(self.points) and (is_settled or is_over(self.deadline))

    def meet_point(self, point: tuple[int, ...]) -> None:
        """Note what choices take."""
        taken = bytes_by_moment(self.formulation.memory, *choices_and_modes(point, self.formulation, self.modes))
        fullest = int(taken.argmax())
        if fullest not in self.moments:
            self.moments.append(fullest)
        if taken[fullest] < self.best:
            self.best, self.best_point = int(taken[fullest]), len(self.points)
        self.points.append(point)
        self.taken.append(taken)


def _solved(problem: Problem, deadline: float) -> Solution:
    with without_warnings():  # the answer says it
        return solve(problem, time_limit=seconds_until(deadline))
