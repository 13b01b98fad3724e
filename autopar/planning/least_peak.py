"""The least memory that any plan takes at its fullest moment, and a plan that takes no more.

    min_x max_m bytes_m(x)  =  min_x max_w Σ_m w_m bytes_m(x)  ≥  max_w min_x Σ_m w_m bytes_m(x)      Σ w = 1,  w ≥ 0

Each min over x is a problem without a limit, which elimination solves. The weights of moments that prove most are found
by cutting planes (Kelley 1960): every answer met says what it takes at every moment, and the next weights are the best
against all answers so far, a small linear program. What the bound leaves open is closed by fixing: choices that cost
more than what is open are in no smaller plan, and an ILP with a row for each moment decides over the rest.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.memory.moments import MemoryRow
from autopar.memory.peak import bytes_by_moment
from autopar.planning.formulation import Formulation, Pins
from autopar.program.recompute_segments import MODES
from autopar.solver.elimination import Tables, evaluate, narrow_elimination
from autopar.solver.fixing import remaining
from autopar.solver.ilp import solve_ilp
from autopar.solver.min_marginals import Excesses, excesses
from autopar.solver.problem import Edge, Node, Problem, Solution
from autopar.solver.solve import solve
from autopar.units import format_bytes

WEIGHTS = 1000  # parts into which weights are divided: rows take whole numbers
MAX_ROUNDS = 60  # of cutting planes
MAX_ROWS = 40  # moments that the ILP may meet
SMALL_PROBLEM = 200_000  # pairs of strategies that the ILP takes
FIXING_SECONDS = 5.0  # of work for each ILP: what it does not decide in that, it seldom decides in more


@dataclass(frozen=True, slots=True)
class LeastPeak:
    """The choices of the smallest peak that was found, and what no plan is below."""

    choices: tuple[int, ...]
    modes: Mapping[str, str]
    peak_bytes: int
    bound: int

    @property
    def is_proven(self) -> bool:
        """Whether no plan takes less."""
        return self.peak_bytes <= self.bound

    def __str__(self) -> str:
        least = f"{format_bytes(self.peak_bytes)} ({self.peak_bytes} bytes)"
        if self.is_proven:
            return f"every choice needs at least {least}"
        return f"the least that was found is {least}, and no choice needs less than {format_bytes(self.bound)}"


def least_peak(formulation: Formulation, pins: Pins, modes: Mapping[str, str] | None) -> LeastPeak:
    """The plan under pins whose fullest moment is the least full; where a little search proves no plan less full.

    The answer does not depend on how fast the machine is. Raises InfeasibleError where the pins contradict each other.
    """
    search = _Search(formulation, pins, modes)
    search.by_weights()
    if search.best > search.least:
        search.by_fixing()
    choices, chosen = search.split(search.points[search.best_point])
    return LeastPeak(choices, chosen, search.best, min(search.least, search.best))


class _Search:
    def __init__(self, formulation: Formulation, pins: Pins, modes: Mapping[str, str] | None) -> None:
        self.formulation, self.pins, self.modes = formulation, pins, modes
        self.points: list[tuple[int, ...]] = []
        """Choices that were met, of decisions and segments, and what each takes at every moment:"""
        self.taken: list[np.ndarray] = []
        self.moments: list[int] = []
        """Moments that were the fullest of some point."""
        self.best, self.best_point = 2**62, -1
        self.least, self.weights = 0, MemoryRow(())
        """The best bound, and the weights that prove it."""

    def by_weights(self) -> None:
        """Cutting planes, until neither the bound nor the best point gets better."""
        weights = MemoryRow(((max(len(self.formulation.memory.lifetimes.calls) - 1, 0), 1),))
        seen: set[MemoryRow] = set()
        while len(seen) < MAX_ROUNDS and weights not in seen:
            seen.add(weights)
            problem = self.formulation.problem(self.pins, weights, None, self.modes).in_bytes()
            solution = _solved(problem)
            bound = int(np.ceil(solution.bound / weights.total - 1e-6))
            if bound > self.least:
                self.least, self.weights = bound, weights
            self.meet(solution.choices)
            if self.best <= self.least:
                return
            weights = self._next_weights()

    def by_fixing(self) -> None:
        """What the bound leaves open, by an ILP with a row for each moment that some point was fullest at."""
        found: Excesses | None = None
        while self.best > self.least and len(self.moments) <= MAX_ROWS:
            smaller = self.best - 1
            rows = (self.weights, *(MemoryRow(((moment, 1),)) for moment in self.moments))
            weighted, *stated = self.formulation.problems(self.pins, rows, smaller, self.modes)
            weighted = weighted.in_bytes()
            open_bytes = float((smaller - self.least + 1) * self.weights.total)
            found = found or _excesses_of(weighted, open_bytes)
            if found is None:
                return
            left = [remaining(_with_bytes(weighted, each), found, open_bytes) for each in stated]
            if any(math.isinf(each.constant) for each in left):
                self.least = self.best
                return
            problems = [each.problem for each in left]
            if sum(edge.seconds.size for edge in problems[0].edges) > SMALL_PROBLEM:
                return
            result = solve_ilp(problems[0], FIXING_SECONDS, rows=problems[1:], repeatable=True)
            if result.status == "infeasible":
                self.least = self.best
            if result.choices is None:
                return
            self.meet(left[0].extend(result.choices))

    def meet(self, point: tuple[int, ...]) -> None:
        """Note what choices take."""
        taken = bytes_by_moment(self.formulation.memory, *self.split(point))
        fullest = int(taken.argmax())
        if taken[fullest] < self.best:
            self.best, self.best_point = int(taken[fullest]), len(self.points)
        if fullest not in self.moments:
            self.moments.append(fullest)
        self.points.append(point)
        self.taken.append(taken)

    def split(self, point: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, str]]:
        """Choices of decisions, and modes of segments."""
        count = len(self.formulation.space.decisions)
        return point[:count], {name: MODES[c] for name, c in zip(self.modes or (), point[count:], strict=True)}

    def _next_weights(self) -> MemoryRow:
        """The weights that prove most if there were no points but those met."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        assert solver is not None
        scale = float(self.best)
        weights = [solver.NumVar(0.0, 1.0, "") for _ in self.moments]
        proven = solver.NumVar(0.0, solver.infinity(), "")
        solver.Add(sum(weights) == 1)
        for taken in self.taken:
            solver.Add(proven <= sum(w * (float(taken[m]) / scale) for w, m in zip(weights, self.moments, strict=True)))
        solver.Maximize(proven)
        solver.Solve()
        parts = ((m, round(WEIGHTS * w.solution_value())) for w, m in zip(weights, self.moments, strict=True))
        return MemoryRow(tuple(sorted((m, w) for m, w in parts if w > 0)))


def _solved(problem: Problem) -> Solution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what is not proven here, the answer says
        return solve(problem)


def _excesses_of(problem: Problem, margin: float) -> Excesses | None:
    """What choices cost above the optimum at least, up to a margin; None where the graph is too wide to tell."""
    tables = Tables(problem)
    elimination = narrow_elimination(problem, tables)
    if elimination is None:
        return None
    return excesses(problem, elimination, evaluate(elimination, tables.weighted(0.0)), margin)


def _with_bytes(problem: Problem, other: Problem) -> Problem:
    """The problem with the bytes and the budget of another that has the same nodes and edges."""
    nodes = (Node(n.name, n.seconds, o.num_bytes) for n, o in zip(problem.nodes, other.nodes, strict=True))
    edges = (Edge(e.ends, e.seconds, o.num_bytes) for e, o in zip(problem.edges, other.edges, strict=True))
    return Problem(tuple(nodes), tuple(edges), other.budget)
