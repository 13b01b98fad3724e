"""Branch and bound over prices of memory (Fisher 1981), of what counts leave undecided.

Where a few large tensors fill the memory, no choices are near what prices mix, and prices prove percents less than any
choices within the budgets take. Of the mixed choices, some then hold a large tensor whole, others a part of it. One
branch takes the most frequent strategy of the decision whose bytes differ most, the other branch all but that one:

    branch       strategies that each decision is left with
    bound        the most that prices prove of a branch
    next         the branch of least bound is divided, and strategies leave both halves whose reduced cost is too high

until no branch has a bound below the best choices that were found.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.bounds.prices import BestPrices, Mixture, best_prices
from autopar.solver.deadline import is_over
from autopar.solver.oracles import EliminationOracle, constant_of
from autopar.solver.presolve.reduced_cost_fixing import only, remaining_of_each
from autopar.solver.problem import Integers
from autopar.solver.remaining.remaining_choices import Counted
from autopar.solver.tolerances import ROUNDING

Fits = Callable[[tuple[int, ...]], bool]
"""Predicate that is true if choices are also within the budgets that are no rows."""


def branch_and_bound(
    rows: EliminationOracle, priced: BestPrices, constant: float, most: float, gap: float, deadline: float, fits: Fits
) -> Counted:
    """Return the best choices of less than `most` seconds within all budgets, and a bound, by a deadline.

    `priced` are the best prices of all choices. The search ends where what is found is proven within a gap, relative to
    its seconds with a `constant`, and at choices that do not fit.
    """
    search = _Search(rows, constant, most, gap, deadline, fits)
    everything = [np.arange(node.num_strategies) for node in rows.problems[0].nodes]
    search.open(_Branch(priced.bound, 0, everything, priced.prices, priced.mixture))
    search.run()
    return Counted(search.best, search.bound, search.is_proven)


@dataclass(order=True, slots=True)
class _Branch:
    bound: float
    number: int
    """Number by which branches of equal bounds are told apart."""
    kept: list[Integers] = field(compare=False)
    """Strategies that each decision is left with."""
    prices: tuple[float, ...] = field(compare=False)
    mixture: Mixture = field(compare=False)


class _Search:
    def __init__(
        self, rows: EliminationOracle, constant: float, most: float, gap: float, deadline: float, fits: Fits
    ) -> None:
        self.rows, self.constant, self.most, self.gap, self.deadline = rows, constant, most, gap, deadline
        self.fits = fits
        self.best: tuple[int, ...] | None = None
        self._open: list[_Branch] = []
        self._numbers = itertools.count()

    @property
    def bound(self) -> float:
        """Seconds that all choices take at least."""
        return min(self.most, self._open[0].bound) if self._open else self.most

    @property
    def enough(self) -> float:
        """Bound at which the best is proven within the gap."""
        return self.most - max(self.gap, ROUNDING) * abs(self.most + self.constant)

    @property
    def is_proven(self) -> bool:
        return self.bound >= self.enough

    def open(self, branch: _Branch) -> None:
        branch.number = next(self._numbers)
        heapq.heappush(self._open, branch)

    def run(self) -> None:
        """Divide branches until the best is proven, does not fit, or time is over."""
        while self._open and not self.is_proven and not is_over(self.deadline):
            branch, known = self._open[0], self.best
            try:
                found = [self._priced(branch, kept) for kept in self._halves(branch)]
            except TimeLimitError:
                return
            heapq.heappop(self._open)
            for each in filter(None, found):
                self.open(each)
            if self.best is not None and self.best is not known and not self.fits(self.best):
                return

    def _halves(self, branch: _Branch) -> list[list[Integers]]:
        """Return what decisions are left with in both halves of a branch."""
        if len(branch.mixture) > 1:
            node, strategy = self._most_mixed(branch)
        else:  # its prices are not quite the best, or nothing that they mix is near enough
            node = int(np.argmax(list(map(len, branch.kept))))
            strategy = int(branch.kept[node][0])
        is_chosen = branch.kept[node] == strategy
        halves = [list(branch.kept), list(branch.kept)]
        halves[0][node], halves[1][node] = branch.kept[node][is_chosen], branch.kept[node][~is_chosen]
        return halves

    def _most_mixed(self, branch: _Branch) -> tuple[int, int]:
        """Return the decision on whose priced bytes mixed choices differ most, and its most frequent strategy."""
        weights = np.array([weight for _, weight in branch.mixture])
        chosen = np.array([choices for choices, _ in branch.mixture])
        differs, spent = np.ptp(chosen, axis=0) > 0, np.zeros(chosen.shape)
        for price, problem in zip(branch.prices, self.rows.problems, strict=True):
            for node in np.flatnonzero(differs) if price else ():
                spent[:, node] += price * problem.nodes[node].num_bytes[chosen[:, node]]
            for edge in problem.edges if price else ():
                ends = list(edge.ends)
                if edge.num_bytes is not None and differs[ends].any():
                    held = edge.num_bytes[tuple(chosen[:, ends].T)] / len(ends)
                    spent[:, ends] += price * held[:, None]
        spread = weights @ (spent - weights @ spent) ** 2
        node = int(np.argmax(np.where(differs, spread, -1.0)))
        strategies, places = np.unique(chosen[:, node], return_inverse=True)
        return node, int(strategies[np.argmax(np.bincount(places, weights))])

    def _priced(self, branch: _Branch, kept: Sequence[Integers]) -> _Branch | None:
        """Return a half of a branch at its best prices, without what is too far above them; None where nothing is
        left.
        """
        whole = self.rows.problems
        left = remaining_of_each(whole, only(whole[0], kept), 0.0, self.rows.parts)
        constant = constant_of(left)
        if math.isinf(constant):
            return None
        rest, order = [each.problem for each in left], self.rows.order_of(left[0])
        rows = EliminationOracle.of(rest, self.deadline, math.inf, order)
        assert rows is not None, "an order was given"
        cutoff = self.enough - constant
        found = best_prices(rows, branch.prices, abs(self.most), constant, 0.0, self.deadline, cutoff=cutoff)
        if found.choices is not None and found.seconds + constant < self.most:
            self.best, self.most = left[0].extend(found.choices), found.seconds + constant
        bound, margin = max(branch.bound, found.bound + constant), self.most - constant - found.bound
        if margin < 0:
            return None
        near, fixed = rows.reduced_costs(found.prices, margin), list(kept)
        for node, place in enumerate(left[0].undecided):
            fixed[place] = kept[place][near.of_node[node] <= margin]
        mixture = tuple(
            [
                (left[0].extend(choices), weight)
                for choices, weight in found.mixture
                if all(costs[choice] <= margin for costs, choice in zip(near.of_node, choices, strict=True))
            ]
        )
        return _Branch(bound, 0, fixed, found.prices, mixture)
