"""Oracles: what a problem with memory rows takes at least at prices of its bytes, and what is left within a margin.

    L(λ) = min_x [seconds(x) + Σ_r λ_r (bytes_r(x) − budget_r)]

Elimination gives L(λ) exactly; if the treewidth is too high for that, messages bound it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autopar.solver.bounds.high_treewidth import Wide
from autopar.solver.elimination.bucket_elimination import Elimination, compile_order, narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import choices_of, evaluate, optimum
from autopar.solver.elimination.min_marginals import ReducedCosts, reduced_costs
from autopar.solver.presolve.reduced_cost_fixing import Remaining, remaining_of_each
from autopar.solver.problem import Floats, Integers, Parts, Problem
from autopar.solver.remaining.searches import Rest

ROUNDING = 1e-12  # of the seconds: what sums in another order may differ by
UNLIMITED = 2**62  # bytes


class EliminationOracle:
    """A problem with several memory rows, ready to be evaluated at prices."""

    def __init__(self, problems: Sequence[Problem], tables: Tables, elimination: Elimination, deadline: float) -> None:
        self.problems, self.tables, self.elimination = tuple(problems), tables, elimination
        self.deadline = deadline
        self.budgets = budgets_of(problems)
        self._last: tuple[tuple[float, ...], list[Floats]] = (), []

    @classmethod
    def of(
        cls, problems: Sequence[Problem], deadline: float, most: float, order: Sequence[int] | None = None
    ) -> EliminationOracle | None:
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

    def reduced_costs(self, prices: tuple[float, ...], margin: float) -> ReducedCosts:
        """Return the reduced costs of strategies above L(λ), where they are below a margin."""
        evaluated = self._evaluated(prices)
        return reduced_costs(self.problems[0], self.elimination, self.tables, evaluated, margin, self.deadline)

    def rest(self, prices: tuple[float, ...], limit: float, margin: float) -> Rest:
        """Return what is left of choices of at most `limit` seconds: strategies and pairs within a margin of L(λ)."""
        left = remaining_of_each(self.problems, self.reduced_costs(prices, margin), margin, self.parts)
        return Rest([] if math.isinf(constant_of(left)) else left, prices, limit, self.deadline)

    def _evaluated(self, prices: tuple[float, ...]) -> list[Floats]:
        if self._last[0] != prices:
            self._last = (), []  # the tables at two prices take twice the memory
            self._last = prices, evaluate(self.elimination, self.tables.weighted(*prices), self.deadline)
        return self._last[1]


class MessageOracle:
    """A problem with several memory rows, of too high treewidth for elimination: messages bound it at prices."""

    def __init__(self, problems: Sequence[Problem], deadline: float) -> None:
        self.problems, self._parts = tuple(problems), Parts(problems)
        self._wide = Wide(problems[0], deadline, problems[1:])
        self.budgets = budgets_of(problems)

    def cost(self, choices: Sequence[int]) -> tuple[float, Integers]:
        """Return the seconds of choices, and their bytes in each row."""
        seconds, row_bytes = self._parts.cost_of(choices)
        return seconds, np.array(row_bytes)

    def at(
        self, prices: tuple[float, ...], known_bound: float = -math.inf, sufficient: float = math.inf
    ) -> tuple[float, tuple[int, ...] | None]:
        """Return a bound on L(λ), and choices that nearly attain it, or that show that it is no more than is known."""
        paid = float(np.dot(prices, self.budgets))
        least, visited = self._wide.least(*prices, known_bound=known_bound + paid, sufficient=sufficient + paid)
        if math.isinf(least):
            return least, None
        return least - paid - ROUNDING * (abs(least) + paid), visited

    def reduced_costs(self, prices: tuple[float, ...], margin: float) -> ReducedCosts:
        """Return reduced costs of strategies above that bound: -inf below a margin, and of pairs, else inf."""
        return self._wide.reduced_costs(self._wide.bound(*prices) + margin, *prices)


def budgets_of(problems: Sequence[Problem]) -> Floats:
    """Return the budgets, in bytes; where a problem has none, more than any choices take."""
    return np.array([UNLIMITED if each.budget is None else each.budget for each in problems], dtype=np.float64)


def constant_of(left: Sequence[Remaining]) -> float:
    """Return the seconds of the decided nodes; infinite if these break a limit, or nothing is left."""
    return math.inf if any(math.isinf(each.constant) for each in left) else left[0].constant
