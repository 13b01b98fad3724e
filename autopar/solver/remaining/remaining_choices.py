"""Remaining problem at prices: the choices of each elimination bag that may be in good enough solutions.

Elimination makes a tree of buckets, and equal subtrees of it share their step (`elimination`). Choices whose reduced
cost (`min_marginals`) at the memory prices exceeds the margin of a limit on the seconds are in no solution within that
limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.solver.elimination.bucket_elimination import Elimination, compile_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import bag_sum, evaluate
from autopar.solver.elimination.min_marginals import outside_steps
from autopar.solver.problem import BLOCK, Floats, Integers, Problem
from autopar.solver.tolerances import SUM_ROUNDING


class TooManyChoicesError(Exception):
    """Error for a remaining problem with too many choices to be searched."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The choices found (None: none), and a bound: no choices cost less than that, or than the limit."""

    choices: tuple[int, ...] | None
    bound: float
    is_proven: bool


def _evaluated(
    problems: Sequence[Problem], prices: Sequence[float], deadline: float
) -> tuple[Tables, Elimination, list[Floats]]:
    """Return the tables of problems, how they are eliminated, and what that gives at some prices."""
    tables = Tables(problems[0], problems[1:])
    orders = [compile_elimination(problems[0], tables, balanced) for balanced in (True, False)]
    elimination = min(orders, key=lambda each: each.work)
    if elimination.largest > BLOCK:
        raise TooManyChoicesError
    return tables, elimination, evaluate(elimination, tables.weighted(*prices), deadline)


class RemainingProblem:
    """A problem with memory rows, evaluated at their prices, and the margin that a limit on the seconds leaves.

    The problems are one with a memory row each: they differ in bytes and budgets. The nearer to the best the prices
    are, the fewer choices are left. Raises TooManyChoicesError, and TimeLimitError where not even the choices are known
    by the deadline.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        prices: Sequence[float],
        limit: float,
        deadline: float,
    ) -> None:
        self.budgets = [each.budget for each in problems]
        self.prices, self.limit, self.deadline = tuple(prices), limit, deadline
        tables, self.elimination, self.weighted = _evaluated(problems, prices, deadline)
        self.costs = tables.costs()
        roots = [b.step for b in self.elimination.buckets if len(b.bag) == 1]
        least = sum(float(self.weighted[self.elimination.num_tables + step]) for step in roots)
        paid = sum(price * (budget or 0) for price, budget in zip(prices, self.budgets, strict=True))
        # Reduced costs carry the rounding of long sums; a choice too many does no harm.
        rounding = SUM_ROUNDING * (abs(least) + paid + abs(limit)) if least < math.inf else 0.0
        self.margin = limit - (least - paid) + rounding
        self.roots = Counter(roots)
        self.outside = outside_steps(self.elimination, self.weighted, self.margin, deadline)

    @cached_property
    def choices(self) -> list[Integers]:
        """Choices of each step's bag within the margin, a row each."""
        return [np.argwhere(self._whole(step) <= self.margin) for step in range(len(self.elimination.steps))]

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

    def own(self, step: int) -> tuple[Floats, Integers]:
        """Return the seconds of the problem's own tables in a step, and bytes by memory row, of its choices."""
        entries = self.choices[step]
        seconds = np.zeros(len(entries))
        num_bytes = np.zeros((len(self.budgets), len(entries)), dtype=np.int64)
        for table, axes in self.elimination.steps[step].inputs:
            if table < self.elimination.num_tables:
                index = tuple(entries[:, axis] for axis in axes)
                seconds += self.costs[table][0][index]
                for row, row_bytes in zip(num_bytes, self.costs[table][1], strict=True):
                    row += 0 if row_bytes is None else row_bytes[index]
        return seconds, num_bytes
