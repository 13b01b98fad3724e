"""The best of what prices leave of a problem with several memory rows, below so many seconds.

Counts of equal parts (`counting_ilp`) are exact, and take little as long as there is little to count: what is near the
bound is counted first, within an ε that grows from round to round. Long counts are broken off if a known solution is
near enough; if not, the search branches (`branch_and_bound`). Then ε doubles, as a long count ends the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def best_below(
    rows: EliminationOracle,
    constant: float,
    start: Sequence[float],
    above: float,
    below: float,
    deadline: float,
    gap: float,
    tolerances: Tolerances,
    incumbent: float,
    is_over_elsewhere: OverElsewhere,
    fits: Fits,
) -> Best:
    """Return the best of what is left that is below some seconds; its bound holds for what is left.

    `constant` are the seconds of what is decided, `start` prices that are near the best. Of the whole problem, no
    choices take less than `above`, and some take the `incumbent` seconds. If the bound of the prices is below the
    limit, the choices that they mix are checked against the other budgets: a solution found here would exceed the same
    ones.
    """
    search = _Search(rows, constant, tuple(start), above, below, deadline, gap, tolerances, incumbent)
    if search.reached < search.most and not search.is_done() and is_over_elsewhere(search.priced.mixture):
        return Best(None, search.bound + constant, search.prices, False, search.reached + constant)
    is_searched = search.run(fits)
    return Best(search.best, search.bound + constant, search.prices, is_searched, search.reached + constant)


class _Search:
    """State of a search in the remaining problem; seconds exclude the constant, except in `incumbent`."""

    def __init__(
        self,
        rows: EliminationOracle,
        constant: float,
        start: tuple[float, ...],
        above: float,
        below: float,
        deadline: float,
        gap: float,
        tolerances: Tolerances,
        incumbent: float,
    ) -> None:
        self.rows, self.constant, self.deadline, self.gap, self.tolerances = rows, constant, deadline, gap, tolerances
        self.incumbent, self.scale = incumbent, abs(below)
        self.priced = priced = best_prices(rows, start, self.scale, constant, gap, deadline)
        self.prices, self.best, self.seconds = priced.prices, priced.choices, priced.seconds
        self.bound = self.reached = priced.bound
        self.most = min(self.seconds, below - constant)
        """Seconds that a solution to be found must not exceed."""
        self.epsilon = max(WORTHWHILE * self.scale, 2 * (above - constant - self.reached))

    def run(self, fits: Fits) -> bool:
        """Count within ever wider margins, and branch where that decides nothing; return whether all was looked at
        that could be better.
        """
        while not self.is_done():
            limit = min(self.most, self.reached + self.epsilon)
            found = self._counted(limit)
            self._note_solution(found, limit)
            if not found.is_proven:
                return self.tolerances.go_on(*self._of_the_whole()) and self._branch(fits)
            if self.most <= limit:
                return True
            self.epsilon *= 2 if self.tolerances.branches else WIDER
        return True

    def _branch(self, fits: Fits) -> bool:
        tolerance = max(self.gap * min(self.incumbent, self.most + self.constant), ROUNDING * self.scale)
        found = branch_and_bound(self.rows, self.priced, self.most, tolerance, self.deadline, fits)
        self._note_solution(found, math.inf)
        return found.is_proven

    def is_done(self) -> bool:
        """Return whether the incumbent is near enough, nothing better can be found, or the time is over."""
        nothing_left = self.bound >= self.most - ROUNDING * self.scale
        return nothing_left or is_over(self.deadline) or is_closed(*self._of_the_whole(), self.gap)

    def _of_the_whole(self) -> tuple[float, float]:
        """Return the seconds of the best of the whole problem that is known, and its bound."""
        return min(self.seconds + self.constant, self.incumbent), self.bound + self.constant

    def _margin(self, limit: float) -> float:
        return limit - self.reached + ROUNDING * self.scale

    def _counted(self, limit: float) -> Counted:
        rest = self.rows.rest(self.prices, limit, self._margin(limit))
        known = self.best if self.seconds <= limit else None
        return rest.counted(ROUNDING / 2 * self.scale, known)

    def _note_solution(self, found: Counted, limit: float) -> None:
        """Note what was found below a limit."""
        if found.choices is not None:
            seconds = self.rows.problems[0].seconds_of(found.choices)
            if seconds < self.seconds:
                self.best, self.seconds = found.choices, seconds
                self.most = min(self.most, seconds)
        self.bound = max(self.bound, min(found.bound, limit, self.most))
