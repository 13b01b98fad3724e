"""The moments of a step at which plans exceed the memory limit, and a memory row for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.costs.memory.moments import MemoryRow
from autopar.solver.bounds.prices import Mixture
from autopar.solver.problem import Problem

MAX_ROWS = 24  # moments that have a row: with more, searches and ILPs take too long
MAX_MIXED = 4  # times that what prices mix adds moments: then single layers are over it, one after the other
OVER = 1e-3  # share of the limit by which a mixture must exceed it at a moment to state a row


@dataclass(slots=True)
class Moments:
    """Rows of a search (`solver.search.RowSource`): the moments that had to be stated so far."""

    state: Callable[[Sequence[MemoryRow]], Sequence[Problem]]
    """Memory rows → the problem with each of them, its budget the limit."""
    taken: Callable[[tuple[int, ...]], np.ndarray]
    """Choices → their bytes at every moment."""
    limit: int
    numbers: list[int]
    """Moments that have a row, in the order in which they were stated."""
    num_mixed: int = 0
    """Number of times that moments were added at which mixed choices exceed the limit on average."""
    _problems: Sequence[Problem] = ()
    _taken: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def problems(self) -> Sequence[Problem]:
        """Return the problem with a row for each of the moments."""
        if len(self._problems) < len(self.numbers):
            self._problems = self.state([MemoryRow(((number, 1),)) for number in self.numbers])
        return self._problems

    def fits(self, choices: tuple[int, ...]) -> bool:
        """Return whether choices are within the limit at every moment; if not, the fullest gets a row."""
        if self.is_within(choices):
            return True
        self._add(int(self._bytes_of(choices).argmax()))
        return False

    def is_within(self, choices: tuple[int, ...]) -> bool:
        """Return whether choices are within the limit at every moment."""
        return bool(self._bytes_of(choices).max() <= self.limit)

    def begin_with(self, choices: tuple[int, ...]) -> None:
        """Begin at the fullest moment of choices that exceed the limit, if at no moment that has a row."""
        taken = self._bytes_of(choices)
        if (taken[self.numbers] <= self.limit).all():
            self.numbers = [int(taken.argmax())]

    def fill_with(self, choices: tuple[int, ...]) -> None:
        """Give moments a row at which choices fill the limit: the first of each stretch of such moments."""
        full = np.flatnonzero(self._bytes_of(choices) >= (1 - OVER) * self.limit)
        for number in full[np.diff(full, prepend=-2) > 1]:
            self._add(int(number))

    def exceeds(self, mixture: Mixture) -> bool:
        """Give the fullest moment a row, if choices exceed the limit there on average; return whether it is a new one.

        Choices found without a row there exceed the limit, too, or their price is wrong. Nothing is added where they
        are over it at a moment that has a row: then no prices are the best, and mostly nothing fits.
        """
        if not mixture or self.num_mixed == MAX_MIXED:
            return False
        most = round((1 + OVER) * self.limit)
        taken = np.array([weight * self._bytes_of(choices) for choices, weight in mixture]).sum(axis=0)
        if (taken[self.numbers] > most).any() or taken.max() <= most or not self._add(int(taken.argmax())):
            return False
        self.num_mixed += 1
        return True

    def _bytes_of(self, choices: tuple[int, ...]) -> np.ndarray:
        if choices not in self._taken:
            self._taken[choices] = self.taken(choices)
        return self._taken[choices]

    def _add(self, number: int) -> bool:
        """Give a moment a row; return whether it had none."""
        if number in self.numbers or len(self.numbers) == MAX_ROWS:
            return False
        self.numbers.append(number)
        return True
