"""Remaining problem at prices: the choices of each elimination bag that may be in good enough solutions.

Elimination makes a tree of buckets, and equal subtrees of it share their step (`elimination`). Choices whose reduced
cost (`min_marginals`) at the memory prices exceeds the margin of a limit on the seconds are in no solution within that
limit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.elimination.bucket_elimination import Elimination, compile_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import bag_sum, evaluate
from autopar.solver.elimination.min_marginals import outside_steps
from autopar.solver.problem import Floats, Integers, Problem

MAX_ENTRIES = 2_000_000  # entries of one bag that are looked at
FEW = 5_000  # choices of all bags together that are soon counted
FACTORS = (0.5, 2.0, 0.0, 4.0)  # of the price of one row: prices near the best
ROUNDING = 1e-12  # of all that is added up: what sums in another order may differ by


class TooManyChoicesError(Exception):
    """Error for a remaining problem with too many choices to be searched."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The choices found (None: none), and a bound: no choices cost less than that, or than the limit."""

    choices: tuple[int, ...] | None
    bound: float
    is_proven: bool


Evaluated = tuple[Tables, Elimination, list[Floats]]
"""Tables of problems, how they are eliminated, and what that gives at some prices."""


def _evaluated(problems: Sequence[Problem], prices: Sequence[float], deadline: float) -> Evaluated:
    tables = Tables(problems[0], problems[1:])
    orders = [compile_elimination(problems[0], tables, balanced) for balanced in (True, False)]
    elimination = min(orders, key=lambda each: each.work)
    if elimination.largest > MAX_ENTRIES:
        raise TooManyChoicesError
    return tables, elimination, evaluate(elimination, tables.weighted(*prices), deadline)


class RemainingProblem:
    """A problem with memory rows, evaluated at their prices, and the margin that a limit on the seconds leaves.

    The problems are one with a memory row each: they differ in bytes and budgets. The nearer to the best the prices
    are, the fewer choices are left. `evaluated` are their tables, an elimination, and what `evaluate` gives at the
    prices, where these are known. Raises TooManyChoicesError, and TimeLimitError where not even the choices are known
    by the deadline.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        prices: Sequence[float],
        limit: float,
        deadline: float,
        evaluated: Evaluated | None = None,
    ) -> None:
        self.budgets = [each.budget for each in problems]
        self.prices, self.limit, self.deadline = tuple(prices), limit, deadline
        tables, self.elimination, self.weighted = evaluated or _evaluated(problems, prices, deadline)
        self._problems, self._tables, self.costs = problems, tables, tables.costs()
        roots = [b.step for b in self.elimination.buckets if len(b.bag) == 1]
        least = sum(float(self.weighted[self.elimination.num_tables + step]) for step in roots)
        paid = sum(price * (budget or 0) for price, budget in zip(prices, self.budgets, strict=True))
        # Reduced costs carry the rounding of long sums; a choice too many does no harm.
        self.rounding = ROUNDING * (abs(least) + paid + abs(limit)) if least < math.inf else 0.0
        self.margin = limit - (least - paid) + self.rounding
        self.roots = Counter(roots)
        self.outside = outside_steps(self.elimination, self.weighted, self.margin, deadline)

    @property
    def is_small(self) -> bool:
        """True if the remaining problem takes little time to count."""
        return self.num_choices <= FEW

    @property
    def num_choices(self) -> int:
        """Number of choices of all bags together."""
        return sum(len(entries) for entries, _ in self.choices)

    def below(self, limit: float) -> RemainingProblem:
        """Return the same with a smaller limit."""
        found = copy(self)
        found.limit, found.margin = limit, self.margin - (self.limit - limit)
        near = [reduced_cost <= found.margin for _, reduced_cost in self.choices]
        found.choices = [
            (entries[rows], reduced_cost[rows])
            for (entries, reduced_cost), rows in zip(self.choices, near, strict=True)
        ]
        return found

    def sharpened(self) -> RemainingProblem:
        """Return the same without choices that are in no good enough solution at other prices, either.

        Choices that the best prices barely leave in may be excluded at others: halved, doubled, … for one row after the
        other, as with more than one dual solution in fixing by reduced costs (Bajgiran, Cire & Rousseau 2017).
        """
        found = copy(self)
        for prices in self._other_prices():
            try:
                other = RemainingProblem(self._problems, prices, self.limit, self.deadline, self._evaluated_at(prices))
            except TimeLimitError:
                break
            near = [
                other._whole(step)[tuple(entries.T)] <= other.margin for step, (entries, _) in enumerate(found.choices)
            ]
            found.choices = [
                (entries[rows], reduced_cost[rows])
                for (entries, reduced_cost), rows in zip(found.choices, near, strict=True)
            ]
        return found

    def _other_prices(self) -> Iterator[tuple[float, ...]]:
        """Prices with that of one row changed; a row without a price gets the mean of those that have one."""
        priced = [each for each in self.prices if each]
        for factor in FACTORS:
            for row, price in enumerate(self.prices):
                other = factor * price if price else (factor - 1) * sum(priced) / max(len(priced), 1)
                if other >= 0 and other != price:
                    yield (*self.prices[:row], other, *self.prices[row + 1 :])

    def _evaluated_at(self, prices: Sequence[float]) -> Evaluated:
        evaluated = evaluate(self.elimination, self._tables.weighted(*prices), self.deadline)
        return self._tables, self.elimination, evaluated

    def seconds_of(self, choices: Sequence[int]) -> float:
        """Return the seconds of choices of the problem."""
        tables = (
            (self.costs[table][0], tuple([choices[bucket.bag[axis]] for axis in axes]))
            for bucket in self.elimination.buckets
            for table, axes in self.elimination.steps[bucket.step].inputs
            if table < self.elimination.num_tables
        )
        return math.fsum(float(seconds[index]) for seconds, index in tables)

    @cached_property
    def choices(self) -> list[tuple[Integers, Floats]]:
        """Choices of each step's bag within the margin, a row each, and their reduced costs."""
        return [self._entries_within(step) for step in range(len(self.elimination.steps))]

    def _entries_within(self, step: int) -> tuple[Integers, Floats]:
        whole = self._whole(step)
        entries = np.argwhere(whole <= self.margin)
        return entries, whole[tuple(entries.T)]

    def _whole(self, step: int) -> Floats:
        """Return the reduced cost of every choice of the bag of a step."""
        message = self.weighted[self.elimination.num_tables + step]
        base = np.where(np.isfinite(message), message, 0.0)
        return bag_sum(self.elimination.steps[step], self.weighted) - base + self.outside[step]

    def messages(self, step: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the children of a step, which are steps, with the axes of its bag that their neighbours are on."""
        num_tables = self.elimination.num_tables
        inputs = self.elimination.steps[step].inputs
        return [(table - num_tables, axes) for table, axes in inputs if table >= num_tables]

    def handed_down(
        self, place: int, children: Sequence[int], below: Iterable[tuple[tuple[int, tuple[int, ...]], int]]
    ) -> dict[int, int]:
        """Return what each child of a bucket takes, from what is known `below` it by message.

        Equal children may take either's.
        """
        left: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for message, taken in below:
            left[message].append(taken)
        buckets = self.elimination.buckets
        axis = {member: number for number, member in enumerate(buckets[place].bag)}
        found: dict[int, int] = {}
        for child in children:
            bucket = buckets[child]
            message = bucket.step, tuple([axis[member] for member in bucket.bag[1:]])
            if left[message]:
                found[child] = left[message].pop()
        return found

    def own(self, step: int) -> tuple[Floats, Integers]:
        """Return the seconds of the problem's own tables in a step, and bytes by memory row, of its choices."""
        entries, _ = self.choices[step]
        seconds = np.zeros(len(entries))
        num_bytes = np.zeros((len(self.budgets), len(entries)), dtype=np.int64)
        for table, axes in self.elimination.steps[step].inputs:
            if table < self.elimination.num_tables:
                index = tuple(entries[:, axis] for axis in axes)
                seconds += self.costs[table][0][index]
                for row, row_bytes in zip(num_bytes, self.costs[table][1], strict=True):
                    row += 0 if row_bytes is None else row_bytes[index]
        return seconds, num_bytes
