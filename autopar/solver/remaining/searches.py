"""Searches of what is left of a problem within a margin: by counts of equal parts, or by the plain ILP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import TimeLimitError
from autopar.solver.deadline import after, check, seconds_until
from autopar.solver.ilp import SMALL_ILP, solve_ilp
from autopar.solver.presolve.reduced_cost_fixing import Remaining
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.remaining_choices import Counted, RemainingProblem, TooManyChoicesError
from autopar.solver.tolerances import EFFORT

SHARE = 0.25  # largest share of the remaining time for one search

UNSEARCHED = Counted(None, -math.inf, False)


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """The problem that is left with each memory row, and prices of these; nothing is where `left` is empty.

    Choices and bounds that its searches return are those of the whole, as far as they are below `limit` seconds.
    """

    left: Sequence[Remaining]
    prices: Sequence[float]
    limit: float
    deadline: float

    def counted(self, tolerance: float, known: Sequence[int] | None = None) -> Counted:
        """Return the best by counting ILPs, or by the plain ILP where there are too many choices for that.

        `known` are choices of the whole to begin with.
        """
        if not self.left:
            return Counted(None, self.limit, True)
        start = None if known is None else self.left[0].restrict(known)
        try:
            return self._of_the_whole(best_counts(self._remaining_problem(), tolerance, self.deadline, start))
        except TooManyChoicesError:
            return self._of_the_whole(self._by_ilp(tolerance, start))
        except TimeLimitError:
            check(self.deadline)
            return UNSEARCHED

    def _by_ilp(self, tolerance: float, start: Sequence[int] | None) -> Counted:
        first, *rows = [each.problem for each in self.left]
        if rows and sum(edge.seconds.size for edge in first.edges) > SMALL_ILP:
            return UNSEARCHED
        result = solve_ilp(first, EFFORT, start, tolerance=tolerance, rows=rows, repeatable=True)
        return Counted(result.choices, result.bound, result.status != "timeout")

    def _remaining_problem(self) -> RemainingProblem:
        soon = after(SHARE * seconds_until(self.deadline))
        problems = [each.problem for each in self.left]
        return RemainingProblem(problems, self.prices, self.limit - self.left[0].constant, soon)

    def _of_the_whole(self, found: Counted) -> Counted:
        choices = None if found.choices is None else self.left[0].extend(found.choices)
        return Counted(choices, min(found.bound + self.left[0].constant, self.limit), found.is_proven)
