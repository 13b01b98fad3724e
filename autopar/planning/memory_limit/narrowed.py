"""Searches with many rows in what one row leaves of a problem, where elimination of the whole takes seconds.

Choices within a thousandth of the bound of one row are searched fast, however many rows are added; if nothing is found
there, a larger margin is searched. No choices are proven to be nearer than that then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import TimeLimitError
from autopar.solver.bounds.prices import OverElsewhere, nowhere
from autopar.solver.deadline import is_over, seconds_until
from autopar.solver.low_treewidth import Tolerances
from autopar.solver.memory_rows.fixings import Fixings, FixingSearch
from autopar.solver.memory_rows.several_rows import Best, solve_rows
from autopar.solver.problem import Problem

SHARES = (1e-3, 4e-3)  # of the bound of one row: within which choices with all rows are looked for


class Narrowed:
    """The cuts of a problem with one row, from the narrowest on; `make` makes them anew, as their tables are large."""

    def __init__(self, make: Callable[[], FixingSearch]) -> None:
        self._fixings_of = make
        self._wider = list(SHARES)
        self._fixings: Fixings | None = None

    def best(
        self,
        problems: Sequence[Problem],
        prices: Sequence[float],
        incumbent: float,
        deadline: float,
        gap: float,
        tolerances: Tolerances,
        visited: Sequence[Sequence[int]] = (),
        is_over_elsewhere: OverElsewhere = nowhere,
    ) -> Best:
        """Solve like `solve_rows`, within the tightest fixings that may leave something better than the incumbent.

        Visited choices count only if the fixings leave them.
        """
        near: list[tuple[int, ...]] = []
        while True:
            try:
                self._fixings = fixings = self._fixings or self._widened(incumbent)
            except TimeLimitError:
                return Best(None, -math.inf, tuple(prices), is_searched=False)
            left, seconds = fixings.of(problems), seconds_until(deadline)
            within = [each for each in visited if fixings.holds(each)]
            found = solve_rows(
                left,
                prices,
                incumbent,
                seconds,
                gap,
                tolerances,
                within,
                limit=fixings.limit,
                is_over_elsewhere=is_over_elsewhere,
            )
            near += found.visited
            found = replace(found, bound=min(found.bound, fixings.limit), visited=tuple(near))
            if (
                found.choices is not None
                or found.is_over_elsewhere
                or incumbent <= fixings.limit
                or not self._wider
                or is_over(deadline)
            ):
                return found
            self._fixings = None

    def may_be_further(self, incumbent: float) -> bool:
        """Return whether something better than the incumbent may lie outside the loosest fixings.

        That is so if all that is inside was tried, and its limit is below the incumbent.
        """
        return not self._wider and self._fixings is not None and self._fixings.limit < incumbent

    def _widened(self, incumbent: float) -> Fixings:
        """Return the next fixings, at a margin no larger than the gap to the incumbent."""
        fixings = self._fixings_of().within(self._wider.pop(0), incumbent)
        if incumbent <= fixings.limit:
            self._wider.clear()
        return fixings
