"""Request within a memory limit: its problems and the answers to them.

If there is no plan, the refusal says why: the least that a plan takes, and what each pin is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.console.units import format_bytes
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import bytes_by_moment, memory_use
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.formulation import Formulation, Pins, pinned_by
from autopar.planning.memory_limit.answers import Answer, choices_of_nodes
from autopar.planning.memory_limit.least_peak import LeastPeak, least_peak
from autopar.solver.deadline import grace, is_over, moment_in, why_over
from autopar.solver.infeasibility import Conflict
from autopar.solver.problem import Problem, Solution

MAX_NAMED = 6  # pins whose worth is worked out

Modes = Mapping[str, str]
"""Segment → its mode, "" where it is free to choose."""


@dataclass(frozen=True, slots=True)
class LimitQuestions:
    """Request for a plan: the formulation, the pins and the deadline."""

    formulation: Formulation
    pins: Pins
    deadline: float
    spare: float
    """Seconds beyond the deadline in which it is looked how little a plan takes, where none was found."""

    def cached(self, limit: int | None, modes: Modes | None) -> Answer | None:
        """Return the cached answer to the same request without the limit; None if there is none."""
        return self.formulation.without_a_limit.get(self._key(limit, modes))

    def cache(self, found: Answer, limit: int | None, modes: Modes | None) -> Answer:
        """Cache an answer that was found without the limit, and return the cached answer of its key."""
        return self.formulation.without_a_limit.setdefault(self._key(limit, modes), found)

    def _key(self, limit: int | None, modes: Modes | None) -> object:
        return limit, None if modes is None else tuple(modes.items()), pinned_by(self.pins)

    def smallest(self, pins: Pins, modes: Modes | None, sufficient: int = 0, is_brief: bool = False) -> LeastPeak:
        """Return the plan under pins with the least peak, or one with a peak of at most `sufficient` (see
        `least_peak`).
        """
        spare = max(self.spare, grace())  # so that there is a number to tell, however late it is
        return least_peak(self.formulation, pins, modes, max(self.deadline, moment_in(spare)), sufficient, is_brief)

    def refusal(self, limit: int, modes: Modes | None, smallest: LeastPeak, conflict: Conflict | None = None) -> str:
        """Why there is no plan: the least that one needs, and what the pins of a conflict are worth."""
        start = f"the memory limit is {format_bytes(limit)} ({limit} bytes) per device, but "
        start += str(smallest)
        # Modes that segments may not have are no pins.
        pinned = None if conflict is None else tuple(node for node in conflict.nodes if node in self.pins)
        if not self.pins or pinned == ():
            return f"{start}, whatever is pinned. Raise the limit, or use more devices."
        if not pinned:
            free = format_bytes(self.smallest({}, modes).peak_bytes)
            return f"{start}; without any pin the least is {free}. Raise the limit, use more devices, or loosen a pin."
        worth = []
        for node in pinned[:MAX_NAMED]:
            if is_over(self.deadline):
                break
            others = {number: mask for number, mask in self.pins.items() if number != node}
            least = format_bytes(self.smallest(others, modes).peak_bytes)
            worth.append(f"without the pin on {self.formulation.name(node)!r} the least is {least}")
        more = f" ({len(pinned) - len(worth)} more pins take part)" if len(pinned) > len(worth) else ""
        if not worth:
            named = ", ".join(repr(self.formulation.name(node)) for node in pinned[:MAX_NAMED])
            return f"{start} with the pins on {named}{more}. Raise the limit, use more devices, or loosen a pin."
        return f"{start}: {'; '.join(worth)}{more}. Raise the limit, use more devices, or loosen one of these pins."

    def smallest_answer(self, limit: int, modes: Modes | None, least_bytes: int) -> Answer:
        """Return the smallest choices found, as an answer without a proof; `least_bytes` is the least peak visited."""
        least = f"the least that was found is {format_bytes(least_bytes)}"
        try:
            smallest = self.smallest(self.pins, modes, limit)
            if smallest.peak_bytes > limit >= smallest.bound and is_over(self.deadline):
                least = str(smallest) if smallest.peak_bytes <= least_bytes else least
                raise TimeLimitError
        except TimeLimitError:
            raise TimeLimitError(
                f"{why_over()} before a plan within the memory limit, {format_bytes(limit)} per device, was "
                f"found: {least}. Raise the time limit or the memory limit, or use more devices."
            ) from None
        if smallest.peak_bytes > limit:
            raise InfeasibleError(self.refusal(limit, modes, smallest), smallest.peak_bytes)
        return self._answer_of(smallest, limit)

    def first_answer(self, limit: int, modes: Modes | None) -> list[Answer]:
        """Some choices that fit, soon found; [] if none are. Raises InfeasibleError where it is soon proven so."""
        smallest = self.smallest(self.pins, modes, limit, is_brief=True)
        if smallest.bound > limit:
            raise InfeasibleError(str(smallest), smallest.peak_bytes)
        return [self._answer_of(smallest, limit)] if smallest.peak_bytes <= limit else []

    def _split(self, choices: tuple[int, ...], modes: Modes | None) -> tuple[tuple[int, ...], dict[str, str]]:
        count = len(self.formulation.space.decisions)
        return choices[:count], {name: MODES[c] for name, c in zip(modes or (), choices[count:], strict=True)}

    def _taken(self, choices: tuple[int, ...], modes: Modes | None) -> np.ndarray:
        """Return the bytes at every moment, of choices of decisions and modes of segments."""
        return bytes_by_moment(self.formulation.memory, *self._split(choices, modes))

    def _bytes_of(self, answer: Answer) -> np.ndarray:
        return bytes_by_moment(self.formulation.memory, answer.choices, answer.modes)

    def _problem(self, row: MemoryRow | None, limit: int | None, modes: Modes | None) -> Problem:
        budget = None if row is None or limit is None else row.total * limit
        return self.formulation.problem(self.pins, row, budget, modes)

    def stated(self, answer: Answer, row: MemoryRow | None, limit: int, modes: Modes | None) -> Answer:
        """Return an answer with the problem of its row, where that is another one than its problem was stated with."""
        return answer if answer.row == row else replace(answer, problem=self._problem(answer.row, limit, modes))

    def _answer(
        self, problem: Problem, solution: Solution, modes: Modes | None, row: MemoryRow | None = None
    ) -> Answer:
        choices, chosen = self._split(solution.choices, modes)
        peak, use, place = memory_use(self.formulation.memory, choices, chosen)
        certificate = solution.solver, solution.multiplier, problem, row, solution.smaller
        return Answer(choices, chosen, solution.seconds, solution.bound, peak, use, place, *certificate)

    def _answer_of(self, smallest: LeastPeak, limit: int) -> Answer:
        """Return the choices of a small peak as an answer of which nothing is proven."""
        modes = smallest.modes or None
        problem = self._problem(None, limit, modes)
        choices = choices_of_nodes(smallest.choices, smallest.modes.values())
        seconds, num_bytes = problem.cost_of(choices)
        return self._answer(problem, Solution(choices, seconds, num_bytes, 0.0, "least peak"), modes)
