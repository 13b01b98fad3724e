"""The best plan whose memory is within a limit at every moment of a step.

The bytes at one moment are one row of the problem, and the limit on one moment, or on a weighted sum of moments, is a
condition that every plan within the limit meets: the best choice under it is a lower bound (a surrogate relaxation,
Glover 1965), and if it is within the limit at every other moment too, it is the best plan. So:

1. Solve with the limit where the backward begins, the fullest moment of most plans. On a wide graph the limit makes
   solving dear, and may not matter: solve it without. Look where the plan is fullest.
2. Solve with the limit at that moment. Where the answer is fuller at another moment, that moment joins the row.
3. When no sum of moments closes in, look what the least is that any plan takes (`least_peak`). If that is within the
   limit, it is an answer, as are those to two harder questions: with the limit on the largest bytes of each choice, and
   with a tighter limit on the sum. The best of them is taken; how far it may be from the best of all is said.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError, PlanError
from autopar.memory.moments import MemoryRow
from autopar.memory.peak import memory_use
from autopar.planning.formulation import Formulation, Pins
from autopar.planning.least_peak import LeastPeak, least_peak
from autopar.plans.rows import MemoryUse
from autopar.program.recompute_segments import MODES
from autopar.solver.ilp import solve_ilp
from autopar.solver.infeasibility import Conflict, MemoryLimitError
from autopar.solver.problem import Problem, Solution
from autopar.solver.solve import solve, solve_narrow
from autopar.units import format_bytes

MAX_SUMS = 6  # sums of moments that are tried before the largest of them
MAX_MOMENTS = 24  # moments that the largest is taken over
SMALL_PROBLEM = 200_000  # pairs of strategies for which the ILP takes a row per moment
MAX_LIMITS = 8  # limits below the true one that are tried
MAX_NAMED = 6  # pins whose worth is worked out
ROWS_SHARE = 0.5  # of the time that is left, at most, goes to the ILP

Modes = Mapping[str, str]
"""Segment → its mode, "" where it is free to choose."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Choices per decision and segment, what they take, and the proof of how good they are."""

    choices: tuple[int, ...]
    modes: Mapping[str, str]
    seconds: float
    bound: float
    peak_bytes: int
    memory: MemoryUse
    fullest: int
    """Place of the call whose backward is the fullest moment."""
    solver: str
    multiplier: float
    problem: Problem
    """The problem on which the bound is proven with the multiplier."""


def best_within(
    formulation: Formulation,
    pins: Pins,
    limit: int | None,
    modes: Modes | None,
    solver: str,
    time_limit: float,
    gap: float,
) -> Answer:
    """The fastest choice whose peak is at most `limit` bytes (None: any); `modes` None leaves recomputation out.

    Where the best could not be proven, the answer's bound is below its seconds, and a RuntimeWarning says so.
    Raises InfeasibleError where no choice is within the limit, with the least that one needs.
    """
    search = _Search(formulation, pins, solver, time.monotonic() + time_limit, gap)
    forced = None if modes is None or not all(modes.values()) else modes
    found = search.where_the_backward_begins(limit, modes) or search.solve(None, limit, forced)
    if limit is None or found.peak_bytes <= limit:
        return found
    proof, moments = found, Counter({found.fullest: 1})
    row = MemoryRow(tuple(moments.items()))
    for _ in range(MAX_SUMS):
        row = MemoryRow(tuple(sorted(moments.items())))
        try:
            found = search.solve(row, limit, modes)
        except MemoryLimitError as error:
            smallest, conflict = search.smallest(pins, modes), error.conflict if pins else None
            raise InfeasibleError(search.refusal(limit, modes, smallest, conflict)) from error
        except InfeasibleError:
            raise
        except PlanError:
            break  # the time is over
        proof = max(proof, found, key=lambda answer: answer.bound)
        if found.peak_bytes <= limit:
            return found
        moments[found.fullest] += 1
    smallest = search.smallest(pins, modes)
    if smallest.peak_bytes > limit:
        raise InfeasibleError(search.refusal(limit, modes, smallest))
    exact = search.by_all_rows(set(moments), limit, modes)
    if exact is not None:
        return exact
    candidates = [
        search.answer_of(smallest, limit),
        *search.by_worst_moments(set(moments), limit, modes),
        *search.by_tighter_limits(row, limit, modes),
    ]
    best = min(candidates, key=lambda answer: answer.seconds)
    share = max(best.seconds - proof.bound, 0.0) / best.seconds
    warnings.warn(
        f"the plan is within the limit at every moment, but not proven best: at most {share:.2%} of its step could be "
        "saved.",
        RuntimeWarning,
        stacklevel=2,
    )
    return replace(
        best,
        bound=min(proof.bound, best.seconds),
        solver=f"{best.solver}, several moments",
        multiplier=proof.multiplier,
        problem=proof.problem,
    )


@dataclass(frozen=True, slots=True)
class _Search:
    formulation: Formulation
    pins: Pins
    solver: str
    deadline: float
    gap: float

    def solve(self, row: MemoryRow | None, limit: int | None, modes: Modes | None) -> Answer:
        """The best under one row and a limit per moment."""
        problem = self._problem(row, limit, modes)
        solution = solve(problem, solver=self.solver, time_limit=self._seconds_left, gap=self.gap)  # type: ignore[arg-type]
        return self._answer(problem, solution, modes)

    def smallest(self, pins: Pins, modes: Modes | None) -> LeastPeak:
        """What takes the least at its fullest moment, under pins."""
        return least_peak(self.formulation, pins, modes)

    def answer_of(self, smallest: LeastPeak, limit: int) -> Answer:
        """The smallest choices as an answer of which nothing is proven."""
        modes = smallest.modes or None
        problem = self._problem(None, limit, modes)
        choices = (*smallest.choices, *(MODES.index(mode) for mode in smallest.modes.values()))
        seconds, num_bytes = problem.cost_of(choices)
        return self._answer(problem, Solution(choices, seconds, num_bytes, 0.0, "least peak"), modes)

    def refusal(self, limit: int, modes: Modes | None, smallest: LeastPeak, conflict: Conflict | None = None) -> str:
        """Why there is no plan: the least that one needs, and what the pins of a conflict are worth."""
        start = f"the memory limit is {format_bytes(limit)} ({limit} bytes) per device, but "
        start += str(smallest)
        pinned = None if conflict is None else conflict.nodes
        if not self.pins or pinned == ():
            return f"{start}, whatever is pinned. Raise the limit, or use more devices."
        if not pinned:
            free = format_bytes(self.smallest({}, modes).peak_bytes)
            return f"{start}; without any pin the least is {free}. Raise the limit, use more devices, or loosen a pin."
        worth = []
        for node in pinned[:MAX_NAMED]:
            others = {number: mask for number, mask in self.pins.items() if number != node}
            least = format_bytes(self.smallest(others, modes).peak_bytes)
            worth.append(f"without the pin on {self.formulation.name(node)!r} the least is {least}")
        more = f" ({len(pinned) - len(worth)} more pins take part)" if len(pinned) > len(worth) else ""
        return f"{start}: {'; '.join(worth)}{more}. Raise the limit, use more devices, or loosen one of these pins."

    def where_the_backward_begins(self, limit: int | None, modes: Modes | None) -> Answer | None:
        """The best with the limit at the last call; None without a limit, and where that is not solved cheaply."""
        last = len(self.formulation.memory.lifetimes.calls) - 1
        if limit is None or last < 0 or self.solver != "auto":
            return None
        problem = self._problem(MemoryRow(((last, 1),)), limit, modes)
        try:
            solution = solve_narrow(problem, self._seconds_left, self.gap)
        except MemoryLimitError:
            return None  # how much is needed, the fullest moment of a plan without a limit says better
        return None if solution is None else self._answer(problem, solution, modes)

    def _problem(self, row: MemoryRow | None, limit: int | None, modes: Modes | None) -> Problem:
        budget = None if row is None or limit is None else row.total * limit
        return self.formulation.problem(self.pins, row, budget, modes)

    @property
    def _seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)

    def _answer(self, problem: Problem, solution: Solution, modes: Modes | None) -> Answer:
        count = len(self.formulation.space.decisions)
        chosen = {name: MODES[choice] for name, choice in zip(modes or (), solution.choices[count:], strict=True)}
        choices = solution.choices[:count]
        peak, use, place = memory_use(self.formulation.memory, choices, chosen)
        certificate = solution.solver, solution.multiplier, problem
        return Answer(choices, chosen, solution.seconds, solution.bound, peak, use, place, *certificate)

    def by_all_rows(self, places: set[int], limit: int, modes: Modes | None) -> Answer | None:
        """The best with a row for every moment, by the ILP; None where the problem is too large for it."""
        until = time.monotonic() + ROWS_SHARE * self._seconds_left
        for _ in range(MAX_MOMENTS):
            rows = tuple(MemoryRow(((place, 1),)) for place in sorted(places))
            problems = self.formulation.problems(self.pins, rows, limit, modes)
            if sum(edge.seconds.size for edge in problems[0].edges) > SMALL_PROBLEM:
                return None
            result = solve_ilp(problems[0], until - time.monotonic(), rows=problems[1:])
            if result.choices is None:
                return None
            count = len(self.formulation.space.decisions)
            chosen = {name: MODES[c] for name, c in zip(modes or (), result.choices[count:], strict=True)}
            choices, seconds = result.choices[:count], problems[0].seconds_of(result.choices)
            peak, use, place = memory_use(self.formulation.memory, choices, chosen)
            if peak <= limit:
                bound = min(result.bound, seconds)
                return Answer(
                    choices, chosen, seconds, bound, peak, use, place, "ilp, several moments", 0.0, problems[0]
                )
            places = places | {place}
        return None

    def by_worst_moments(self, places: set[int], limit: int, modes: Modes | None) -> list[Answer]:
        """The best of the choices that fit even if every one of them is at its largest at once; [] if there is none."""
        while len(places) <= MAX_MOMENTS:
            row = MemoryRow(tuple((place, 1) for place in sorted(places)), worst=True)
            try:
                found = self.solve(row, limit, modes)
            except PlanError:
                return []
            if found.peak_bytes <= limit:
                return [found]
            places = places | {found.fullest}
        return []

    def by_tighter_limits(self, row: MemoryRow, limit: int, modes: Modes | None) -> list[Answer]:
        """Answers under a sum of moments with less than the limit, halving what is taken off it."""
        found: list[Answer] = []
        low, high = 0, limit  # the most that was found to be too tight, and the least that was too loose
        for _ in range(MAX_LIMITS):
            tighter = (low + high) // 2
            try:
                answer = self.solve(row, tighter, modes)
            except PlanError:
                low = tighter
                continue
            if answer.peak_bytes <= limit:
                found.append(answer)
                low = tighter
            else:
                high = tighter
        return found
