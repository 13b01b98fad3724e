"""The best of what prices leave of a problem with several memory rows, below so many seconds.

Counts of equal parts (`counting_ilp`) are exact, and take little as long as there is little to count: what is near the
bound is counted first, within an ε that grows from round to round. What counts leave undecided is branched
(`branch_and_bound`), unless a known solution is near enough. Then ε doubles, as a long count ends the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.solver.bounds.prices import WORTHWHILE, OverElsewhere, best_prices
from autopar.solver.branch_and_bound import Fits, branch_and_bound
from autopar.solver.deadline import is_over
from autopar.solver.oracles import EliminationOracle
from autopar.solver.remaining.remaining_choices import Counted
from autopar.solver.tolerances import ROUNDING, Tolerances, is_closed

WIDER = 8.0  # factor by which margins grow, and shrink if what is left has too high a treewidth


@dataclass(frozen=True, slots=True)
class Best:
    """The best choices that are within all budgets (None: none better than those known), a bound, and its prices."""

    choices: tuple[int, ...] | None
    bound: float
    prices: tuple[float, ...]
    is_searched: bool = True
    """True if everything that could be better was searched; False if a count was broken off."""
    reached: float = -math.inf
    """Bound that the prices alone prove."""


@dataclass
class BestBelow:
    """A search for the best of what is left; its own seconds exclude the constant, those of the whole do not."""

    rows: EliminationOracle
    constant: float
    """Seconds of what is decided."""
    start: tuple[float, ...]
    """Prices that are near the best."""
    above: float
    """Seconds that all choices of the whole take at least."""
    below: float
    """Seconds that the best is looked for below."""
    deadline: float
    gap: float
    tolerances: Tolerances
    incumbent: float
    """Seconds that known choices of the whole take."""

    def __post_init__(self) -> None:
        self.scale, most = abs(self.below), self.below - self.constant
        self.priced = best_prices(
            self.rows, self.start, self.scale, self.constant, self.gap, self.deadline, cutoff=most
        )
        self.best, self.seconds, self.bound = self.priced.choices, self.priced.seconds, self.priced.bound
        self.most = min(self.seconds, most)
        """Seconds that a solution to be found must not exceed."""

    def search(self, is_over_elsewhere: OverElsewhere, fits: Fits) -> Best:
        """Return the best; its bound holds for what is left.

        If the bound of the prices is below the limit, the choices that they mix are checked against the other budgets:
        a solution found here would exceed the same ones.
        """
        reached, prices = self.priced.bound + self.constant, self.priced.prices
        if self.bound < self.most and not self.is_done() and is_over_elsewhere(self.priced.mixture):
            return Best(None, reached, prices, False, reached)
        is_searched = self._run(fits)
        return Best(self.best, self.bound + self.constant, prices, is_searched, reached)

    def is_done(self) -> bool:
        """Return whether the incumbent is near enough, nothing better can be found, or the time is over."""
        nothing_left = self.bound >= self.most - ROUNDING * self.scale
        return nothing_left or is_over(self.deadline) or is_closed(*self._of_the_whole(), self.gap)

    def _run(self, fits: Fits) -> bool:
        """Count within ever wider margins, and branch where that decides nothing; return whether all was looked at
        that could be better.
        """
        reached = self.priced.bound
        epsilon = max(WORTHWHILE * self.scale, 2 * (self.above - self.constant - reached))
        while not self.is_done():
            limit = min(self.most, reached + epsilon)
            margin = limit - reached + ROUNDING * self.scale
            known = self.best if self.seconds <= limit else None
            goes_on = self.tolerances.go_on(*self._of_the_whole())
            found = self.rows.counted(self.priced.prices, limit, margin, ROUNDING / 2 * self.scale, known, goes_on)
            self._note(found, limit)
            if not found.is_proven:
                return goes_on and not self.is_done() and self._branch(fits)
            if self.most <= limit:
                return True
            epsilon *= 2 if self.tolerances.branches else WIDER
        return True

    def _branch(self, fits: Fits) -> bool:
        found = branch_and_bound(self.rows, self.priced, self.constant, self.most, self.gap, self.deadline, fits)
        self._note(found, math.inf)
        return found.is_proven

    def _of_the_whole(self) -> tuple[float, float]:
        """Return the seconds of the best of the whole problem that is known, and its bound."""
        return min(self.seconds + self.constant, self.incumbent), self.bound + self.constant

    def _note(self, found: Counted, limit: float) -> None:
        """Note what was found below a limit."""
        if found.choices is not None:
            seconds = self.rows.problems[0].seconds_of(found.choices)
            if seconds < self.seconds:
                self.best, self.seconds = found.choices, seconds
                self.most = min(self.most, seconds)
        self.bound = max(self.bound, min(found.bound, limit, self.most))
