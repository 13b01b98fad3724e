"""A problem with several memory rows at prices of its bytes: what it takes at least, and what is left within a margin.

    L(λ) = min_x [seconds(x) + Σ_r λ_r (bytes_r(x) − budget_r)]

Elimination gives L(λ) exactly (`Rows`); if the treewidth is too high for that, messages bound it (`WideRows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.bounds.high_treewidth import WORTHWHILE, Wide
from autopar.solver.deadline import after, check, seconds_until
from autopar.solver.elimination.bucket_elimination import Elimination, compile_order, narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import choices_of, evaluate, optimum
from autopar.solver.elimination.min_marginals import ReducedCosts, shared_reduced_costs
from autopar.solver.low_treewidth import best_left, labelled
from autopar.solver.presolve.reduced_cost_fixing import Remaining, remaining_of_each
from autopar.solver.problem import Floats, Integers, Parts, Problem
from autopar.solver.remaining.remaining_choices import Counted, Evaluated, TooManyChoicesError

ROUNDING = 1e-12  # of the seconds: what sums in another order may differ by
ROUGHLY = 0.1  # of what is open: a sweep that closes less is slow at prices yet to be found
ROUGHLY_NEAR = 5e-4  # of the seconds: messages so near to choices are good enough at prices yet to be found
SMALL_WORK = 4_000_000  # entries of an elimination that labels and counts look through whole
COUNTING = 0.25  # of the time that is left, at most, goes to one count

_T = TypeVar("_T")
UNCOUNTED = Counted(None, -math.inf, False)
UNLABELLED = UNCOUNTED, False


class Rows:
    """A problem with several memory rows, ready to be evaluated at prices."""

    def __init__(self, problems: Sequence[Problem], tables: Tables, elimination: Elimination, deadline: float) -> None:
        self.problems, self.tables, self.elimination = tuple(problems), tables, elimination
        self.deadline = deadline
        self.budgets = np.array([each.budget for each in problems], dtype=np.float64)
        self._last: tuple[tuple[float, ...], list[Floats]] = (), []

    @classmethod
    def of(
        cls, problems: Sequence[Problem], deadline: float, most: float, order: Sequence[int] | None = None
    ) -> Rows | None:
        """Return None if the treewidth is too high, or an evaluation takes more than so many entries.

        An order in which nodes are eliminated is looked for if none is given.
        """
        tables = Tables(problems[0], problems[1:])
        elimination = (
            narrow_elimination(problems[0], tables) if order is None else compile_order(problems[0], tables, order)
        )
        if elimination is None or elimination.work > most:
            return None
        return cls(problems, tables, elimination, deadline)

    def at(
        self, prices: tuple[float, ...], known_bound: float = -math.inf, sufficient: float = math.inf
    ) -> tuple[float, tuple[int, ...]]:
        """L(λ), and choices that attain it, whatever is known or enough."""
        evaluated = self._evaluated(prices)
        least, paid = optimum(self.elimination, evaluated), float(np.dot(prices, self.budgets))
        if math.isinf(least):
            return least, choices_of(self.elimination, evaluated)
        slack = ROUNDING * (abs(least) + paid)  # in the table sums, which must not let the bound pass what it bounds
        return least - paid - slack, choices_of(self.elimination, evaluated)

    def cost(self, choices: Sequence[int]) -> tuple[float, Integers]:
        """Return the seconds of choices, and their bytes in each row."""
        seconds, row_bytes = self.parts.cost_of(choices)
        return seconds, np.array(row_bytes)

    @cached_property
    def parts(self) -> Parts:
        """Nodes and edges of the problems, grouped by equal arrays."""
        return Parts(self.problems)

    def within(self, prices: tuple[float, ...], margin: float) -> list[Remaining]:
        """Return for each row the remaining problem without strategies and pairs that cost over a margin above L(λ)."""
        return self.left(self.reduced_costs(prices, margin), margin)

    def reduced_costs(self, prices: tuple[float, ...], margin: float) -> ReducedCosts:
        """Return the reduced costs of strategies above L(λ), where they are below a margin."""
        evaluated = self._evaluated(prices)
        return shared_reduced_costs(self.problems[0], self.elimination, self.tables, evaluated, margin, self.deadline)

    def on(self, left: Sequence[Remaining]) -> Rows:
        """Return the rows of the remaining problem, eliminated in the same order."""
        place = {node: number for number, node in enumerate(left[0].undecided)}
        order = [place[bucket.bag[0]] for bucket in self.elimination.buckets if bucket.bag[0] in place]
        found = Rows.of([each.problem for each in left], self.deadline, math.inf, order)
        assert found is not None, "however many entries it has"
        return found

    def left(self, found: ReducedCosts, margin: float) -> list[Remaining]:
        """Return for each row the remaining problem without strategies and pairs that cost more than a margin."""
        return remaining_of_each(self.problems, found, margin, self.parts)

    def labelled(self, prices: tuple[float, ...], limit: float, margin: float) -> tuple[Counted, bool]:
        """Good choices of which all strategies are within a margin of L(λ), and whether those are soon counted."""
        near = self._remaining_within(prices, limit, margin)
        if near is None:
            return Counted(None, limit, True), True
        soon = after(COUNTING * seconds_until(self.deadline))
        search = lambda: labelled(near.problems, prices, near.limit, soon, near.evaluated)  # noqa: E731
        found, is_small = self._in_part_of_time(search) or UNLABELLED
        return near.of_the_whole(found, limit), is_small

    def counted(
        self,
        prices: tuple[float, ...],
        limit: float,
        margin: float,
        tolerance: float,
        effort: float,
        only_few: bool = False,
    ) -> Counted | None:
        """Return the best choices of at most `limit` seconds, all of whose strategies are within a margin of L(λ).

        With `only_few` None where what is left takes long to count.
        """
        near = self._remaining_within(prices, limit, margin)
        if near is None:
            return Counted(None, limit, True)
        soon = after(COUNTING * seconds_until(self.deadline))
        search = lambda: best_left(near.problems, prices, near.limit, tolerance, soon, effort, near.evaluated, only_few)  # noqa: E731
        try:
            return near.of_the_whole(self._in_part_of_time(search) or UNCOUNTED, limit)
        except TooManyChoicesError:
            return None

    def _in_part_of_time(self, search: Callable[[], _T]) -> _T | None:
        """Run a search that has part of the time; return None if its time was too short.

        Raises TimeLimitError if the deadline of the whole has passed.
        """
        try:
            return search()
        except TimeLimitError:
            check(self.deadline)
            return None

    def _remaining_within(self, prices: tuple[float, ...], limit: float, margin: float) -> _Near | None:
        """Return the problems that labels and counts search; None if nothing is within the margin."""
        if self.elimination.work <= SMALL_WORK:  # to cut it takes longer than to look through it
            return _Near(self.problems, limit, (self.tables, self.elimination, self._evaluated(prices)))
        left = self.within(prices, margin)
        constant = constant_of(left)
        if math.isinf(constant):
            return None
        return _Near([each.problem for each in left], limit - constant, left=left[0])

    def _evaluated(self, prices: tuple[float, ...]) -> list[Floats]:
        if self._last[0] != prices:
            self._last = prices, evaluate(self.elimination, self.tables.weighted(*prices), self.deadline)
        return self._last[1]


class WideRows:
    """A problem with several memory rows, of too high treewidth for elimination: messages bound it at prices."""

    def __init__(self, problems: Sequence[Problem], deadline: float) -> None:
        self.problems, self._parts = tuple(problems), Parts(problems)
        self._wide = Wide(problems[0], deadline, ROUGHLY_NEAR, problems[1:])
        self._wide.worthwhile = ROUGHLY
        self._budgets = np.array([each.budget for each in problems], dtype=np.float64)

    def cost(self, choices: Sequence[int]) -> tuple[float, Integers]:
        """Return the seconds of choices, and their bytes in each row."""
        seconds, row_bytes = self._parts.cost_of(choices)
        return seconds, np.array(row_bytes)

    @property
    def num_entries(self) -> int:
        """Table entries that messages touch in one direction, at most, including per-message overhead."""
        return self._wide.num_entries

    def finely(self) -> None:
        """Let sweeps go on for longer from now on: until they gain less than `WORTHWHILE`."""
        self._wide.worthwhile = WORTHWHILE

    def at(
        self, prices: tuple[float, ...], known_bound: float = -math.inf, sufficient: float = math.inf
    ) -> tuple[float, tuple[int, ...] | None]:
        """Return a bound on L(λ), and choices that nearly attain it, or that show that it is no more than is known."""
        paid = float(np.dot(prices, self._budgets))
        least, visited = self._wide.least(*prices, known_bound=known_bound + paid, sufficient=sufficient + paid)
        return least - paid - ROUNDING * (abs(least) + paid), None if visited is None else visited.choices

    def within(self, prices: tuple[float, ...], margin: float) -> list[Remaining]:
        """Return for each row the remaining problem without strategies that cost over a margin above that bound."""
        return self._wide.within(self._wide.bound(*prices) + margin, *prices)


def constant_of(left: Sequence[Remaining]) -> float:
    """Return the seconds of the decided nodes; infinite if these break a limit, or nothing is left."""
    return math.inf if any(math.isinf(each.constant) for each in left) else left[0].constant


@dataclass(frozen=True, slots=True, eq=False)
class _Near:
    """Problems that choices are looked for in, all of a problem or what is left of it, and the most they may cost."""

    problems: Sequence[Problem]
    limit: float
    evaluated: Evaluated | None = None
    left: Remaining | None = None

    def of_the_whole(self, found: Counted, limit: float) -> Counted:
        """Lift choices and a bound of the remaining problem to the whole problem."""
        if self.left is None:
            return found
        choices = None if found.choices is None else self.left.extend(found.choices)
        return Counted(choices, min(found.bound + self.left.constant, limit), found.is_proven)
