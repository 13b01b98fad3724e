"""Refusal of a memory limit, where no plan is within it: the least that a plan takes, and what each pin is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from autopar.console.units import format_bytes
from autopar.costs.space.narrowed import Pins, is_large
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.planning.formulation import Formulation
from autopar.planning.memory_limit.least_peak import LeastPeak, least_peak
from autopar.solver.deadline import grace, is_over, moment_in, until, why_over
from autopar.solver.infeasibility import MAX_NAMED, conflict_with_limit, describe_conflict
from autopar.solver.problem import Problem
from autopar.solver.search import RowSource

Modes = Mapping[str, str]
"""Segment → its mode, "" where it is free to choose."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of the plans of a formulation under pins, with the time until which it may look how little these take."""

    formulation: Formulation
    pins: Pins
    deadline: float
    spare: float
    """Seconds beyond the deadline in which it is looked how little a plan takes, where none was found."""
    is_brief: bool = False
    """True if a refusal does not work out what pins are worth, nor a bound beyond the limit."""

    @contextmanager
    def naming_pins(self) -> Iterator[None]:
        """Name the pins that contradict each other where these have narrowed the space, so that it has none."""
        try:
            yield
        except InfeasibleError as error:
            whole, pins = self.formulation.widened(self.pins)
            if error.least_bytes is not None or self.formulation.space.kept is None or is_large(whole.space):
                raise
            with until(self._until):
                raise InfeasibleError(describe_conflict(whole.problem(pins), self.deadline)) from None

    def _smallest(self, modes: Modes | None, sufficient: int) -> LeastPeak:
        """Return the plan with the least peak, or one with a peak of at most `sufficient` (see `least_peak`)."""
        with until(moment := self._until):
            return least_peak(self.formulation, self.pins, modes, moment, sufficient, self.is_brief)

    def _least(self, whole: Formulation, pins: Pins, modes: Modes | None) -> str:
        """Return the least peak under other pins on the whole space."""
        with until(moment := self._until):
            return format_bytes(least_peak(*whole.narrowed(pins), modes, moment).peak_bytes)

    @property
    def _until(self) -> float:
        spare = max(self.spare - grace(), 0.0)  # so that there is a number to tell, however late it is
        return max(self.deadline, moment_in(spare))

    def _words(self, limit: int, modes: Modes | None, smallest: LeastPeak) -> str:
        """Return why there is no plan: the least that one needs, and what the pins that take part are worth."""
        start = f"the memory limit is {format_bytes(limit)} ({limit} bytes) per device, but {smallest}"
        if self.is_brief:
            return f"{start}."
        whole, pins = self.formulation.widened(self.pins)
        conflict = self._conflict(whole, pins, limit, modes, smallest)
        # Modes that segments may not have are no pins.
        pinned = None if conflict is None else tuple(node for node in conflict if node in pins)
        if not pins or pinned == ():
            return f"{start}, whatever is pinned. Raise the limit, or use more devices."
        if not pinned:
            free = self._least(whole, {}, modes)
            return f"{start}; without any pin the least is {free}. Raise the limit, use more devices, or loosen a pin."
        worth = []
        for node in pinned[:MAX_NAMED]:
            if is_over(self.deadline):
                break
            others = {number: mask for number, mask in pins.items() if number != node}
            least = self._least(whole, others, modes)
            worth.append(f"without the pin on {self.formulation.name(node)!r} the least is {least}")
        more = f" ({len(pinned) - len(worth)} more pins take part)" if len(pinned) > len(worth) else ""
        if not worth:
            named = ", ".join(repr(self.formulation.name(node)) for node in pinned[:MAX_NAMED])
            return f"{start} with the pins on {named}{more}. Raise the limit, use more devices, or loosen a pin."
        return f"{start}: {'; '.join(worth)}{more}. Raise the limit, use more devices, or loosen one of these pins."

    def _conflict(
        self, whole: Formulation, pins: Pins, limit: int, modes: Modes | None, smallest: LeastPeak
    ) -> tuple[int, ...] | None:
        """Return the nodes whose pins conflict with the limit; None if there are none, or that is not proven."""
        if not pins or smallest.bound <= limit or is_large(whole.space):
            return None
        with suppress(TimeLimitError), until(self._until):
            return conflict_with_limit(whole.problem(pins, smallest.weights, limit, modes), self.deadline)
        return None

    def first_of(self, source: RowSource, limit: int) -> Problem:
        """Return the first problem of a search within a limit; TimeLimitError if there is no time to state it."""
        try:
            return source.problems()[0]
        except TimeLimitError:
            raise TimeLimitError(self._too_late(limit)) from None

    def smallest_within(self, limit: int, modes: Modes | None) -> LeastPeak:
        """Return the smallest plan; its peak may exceed the limit if no plan is proven to.

        Raises InfeasibleError where one is, and TimeLimitError where there was no time for any.
        """
        try:
            smallest = self._smallest(modes, limit)
        except TimeLimitError:
            raise TimeLimitError(self._too_late(limit)) from None
        if smallest.bound > limit:
            raise self.none_within(limit, modes, smallest)
        return smallest

    def none_within(self, limit: int, modes: Modes | None, smallest: LeastPeak) -> InfeasibleError | TimeLimitError:
        """Return the error where no plan was found, by the smallest that is known."""
        if smallest.bound <= limit and is_over(self.deadline):
            return TimeLimitError(self._too_late(limit, str(smallest)))
        return InfeasibleError(self._words(limit, modes, smallest), smallest.peak_bytes)

    def _too_late(self, limit: int, least: str = "") -> str:
        return (
            f"{why_over()} before a plan within the memory limit, {format_bytes(limit)} per device, was found"
            f"{least and ': '}{least}. Raise the time limit or the memory limit, or use more devices."
        )
