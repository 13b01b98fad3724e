"""The prices of several memory rows that prove most, by cutting planes (Kelley 1960).

    L(λ) = min_x [seconds(x) + Σ_r λ_r (bytes_r(x) − budget_r)]        λ ≥ 0

Every visited x bounds L from above, and the next prices lie halfway to those that are best against all of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.errors import TimeLimitError
from autopar.solver.deadline import is_over
from autopar.solver.problem import Integers, Parts, Problem
from autopar.solver.tolerances import ROUNDING, SUM_ROUNDING, is_closed

UNLIMITED = 2.0**62  # bytes
MAX_PLANES = 60  # evaluations in search of prices, or of weights of moments
NEARER = 0.5  # share of the way from the best prices to those that are best against all visited solutions
BOX = 16.0  # times the prices to begin with: further ones are only looked at where half of that is too low
NEAR = 0.1  # share of what better prices may prove: choices at some prices need be no nearer to the best there
PATIENCE = 3  # evaluations or sweeps in a row that prove no more
ROUGHLY = 5e-3  # largest gain of better prices, relative to the bound, at which mixtures are checked
WORTHWHILE = 5e-6  # share of the bound that is worth another evaluation at better prices, or a count


Mixture = tuple[tuple[tuple[int, ...], float], ...]
"""Choices with weights that add up to one: on average they are within all budgets, and no better average is known."""
Evaluation = tuple[float, tuple[int, ...] | None]
"""A bound at some prices, and choices that (nearly) attain it, if any were found."""
OverElsewhere = Callable[[Mixture], bool]
"""Predicate that is true if a mixture exceeds a budget that is no row of the problems."""
Refine = Callable[[Mixture, float], tuple[float, tuple[float, ...]] | None]
"""Mixture, and the best bound so far → the most that any prices prove, and the prices that may; None: unknown."""


class PricedRows:
    """A problem with several memory rows, ready to be evaluated at prices of them all."""

    def __init__(self, problems: Sequence[Problem], deadline: float) -> None:
        self.problems, self.deadline = tuple(problems), deadline
        self.budgets = np.array([UNLIMITED if each.budget is None else float(each.budget) for each in problems])

    def at(
        self,
        prices: tuple[float, ...],
        known_bound: float = -math.inf,
        sufficient: float = math.inf,
        near: float = ROUNDING,
    ) -> Evaluation:
        """Return L(λ) or a bound on it, and choices that (nearly) attain it; None if none were found.

        Where L(λ) is no more than what is `known_bound`, any choices that show it will do, as will a bound that is
        `sufficient`, and choices within a relative gap that is `near`.
        """
        paid = float(np.dot(prices, self.budgets))
        least, choices = self.least(prices, known_bound + paid, sufficient + paid, near)
        if math.isinf(least):
            return least, None
        # Rounding must not let the bound pass what it bounds.
        return least - paid - SUM_ROUNDING * (abs(least) + paid), choices

    @abstractmethod
    def least(self, prices: tuple[float, ...], known_bound: float, sufficient: float, near: float) -> Evaluation:
        """Return the same of seconds + prices · bytes."""

    def cost(self, choices: Sequence[int]) -> tuple[float, Integers]:
        """Return the seconds of choices, and their bytes in each row."""
        seconds, row_bytes = self.parts.cost_of(choices)
        return seconds, np.array(row_bytes)

    @cached_property
    def parts(self) -> Parts:
        """Nodes and edges of the problems, grouped by equal arrays."""
        return Parts(self.problems)


@dataclass(frozen=True, slots=True)
class BestPrices:
    """Prices, their bound, and the fastest visited solution within all budgets.

    The best prices are those at which what is mixed of the solutions costs the same.
    """

    prices: tuple[float, ...]
    bound: float
    choices: tuple[int, ...] | None
    seconds: float
    mixture: Mixture = ()
    is_over_elsewhere: bool = False
    """True if the mixture exceeds a budget that is no row."""


def best_prices(
    rows: PricedRows,
    start: tuple[float, ...],
    scale: float,
    constant: float,
    gap: float,
    deadline: float,
    worthwhile: float = WORTHWHILE,
    cutoff: float = math.inf,
    known: tuple[int, ...] | None = None,
    at_start: Evaluation | None = None,
    is_over_elsewhere: OverElsewhere = lambda _: False,
    refine: Refine | None = None,
) -> BestPrices:
    """Return the prices with the highest bound, and the fastest visited solution within all budgets.

    `constant` seconds are added to each solution; one within the gap is enough. Prices are looked for no longer where
    better ones could prove less than a `worthwhile` share of `scale` seconds, and choices at some prices are as near to
    the best there as what is open asks for. A bound as high as the `cutoff` ends the search. The mixture at prices that
    are `ROUGHLY` optimal is checked against the budgets that are not rows. The search ends if it exceeds one: with that
    row, other prices are optimal. Choices that are `known` to be within all budgets bound what prices prove from the
    beginning. `at_start` is what the first prices give, if that is known. `refine` tells better prices than the planes.
    """
    cost = float(np.dot(start, rows.budgets))
    planes = _Planes(rows.budgets, max(BOX * cost, scale / NEARER, 1e-300))
    best, prices, open_there, stalled = BestPrices(start, -np.inf, None, np.inf), start, math.inf, 0
    visited, near = set[tuple[int, ...]](), ROUGHLY
    if known is not None:
        seconds, row_bytes = rows.cost(known)
        planes.after(known, seconds, row_bytes - rows.budgets)
    for _ in range(MAX_PLANES):
        try:
            sufficient = min((1 - gap) * (best.seconds + constant) - constant, cutoff)
            reached, choices = at_start or rows.at(prices, best.bound, sufficient, near)
        except TimeLimitError:
            break
        at_start = None
        if choices is None:
            return replace(best, prices=prices, bound=reached) if reached > best.bound else best
        seconds, row_bytes = rows.cost(choices)
        over = row_bytes - rows.budgets
        stalled = 0 if reached > best.bound + worthwhile * scale else stalled + 1
        if reached > best.bound:
            # At these prices no more is proven than what the choices cost there.
            best = replace(best, prices=prices, bound=reached)
            open_there = seconds + float(np.dot(prices, over)) - reached
        if (over <= 0).all() and seconds < best.seconds:
            best = replace(best, choices=choices, seconds=seconds)
        planes.lift(np.array(prices), over)
        most, wanted = planes.after(choices, seconds, over)
        # Visited choices add no information: the optimum against them is proven there, or new choices are visited.
        share = 1.0 if choices in visited else NEARER
        visited.add(choices)
        if refine is not None and (refined := refine(planes.mixture(), best.bound)) is not None:
            most, wanted, share = min(most, refined[0]), np.array(refined[1]), 1.0
        near = max(worthwhile, NEAR * (most - best.bound) / (scale or 1.0))
        is_near = is_closed(best.seconds + constant, best.bound + constant, gap) or best.bound >= cutoff
        is_stalled = stalled >= PATIENCE and open_there > worthwhile * scale  # only if evaluations are not exact
        is_settled = most - best.bound <= max(worthwhile * scale, open_there)  # no better price is known to prove more
        if is_near or is_stalled or is_settled or is_over(deadline):
            break
        if most - best.bound <= ROUGHLY * scale and is_over_elsewhere(planes.mixture()):
            return replace(best, mixture=planes.mixture(), is_over_elsewhere=True)
        prices = tuple((share * wanted + (1 - share) * np.array(best.prices)).tolist())
    return replace(best, mixture=planes.mixture())


class _Planes:
    """Linear program over prices; each visited solution is an upper bound on what they prove."""

    def __init__(self, budgets: np.ndarray, box: float) -> None:
        """Cap the price of a full row at `box` seconds."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        assert solver is not None
        self._solver, self._unit = solver, np.maximum(box / np.maximum(budgets, 1.0), 1e-300)  # price of a share of one
        self._shares = [solver.NumVar(0.0, 1.0, "") for _ in budgets]
        self._bound = solver.NumVar(-solver.infinity(), solver.infinity(), "")
        solver.Maximize(self._bound)
        self._planes: list[tuple[tuple[int, ...], pywraplp.Constraint]] = []
        self._is_mixed = False
        """True if the linear program is solved; its mixture is then within all budgets."""

    def after(self, choices: tuple[int, ...], seconds: float, over: np.ndarray) -> tuple[float, np.ndarray]:
        """Add a solution with its seconds and its bytes over each budget; return the best bound and its prices.

        The bound is -inf if the numbers are too far apart for the linear program to be solved.
        """
        paid = sum(share * float(each) for share, each in zip(self._shares, over * self._unit, strict=True))
        self._planes.append((choices, self._solver.Add(self._bound <= seconds + paid)))
        self._is_mixed = self._solver.Solve() == pywraplp.Solver.OPTIMAL
        if not self._is_mixed:
            return -math.inf, np.zeros(len(self._shares))
        found, bound = np.array([each.solution_value() for each in self._shares]), self._bound.solution_value()
        return bound, found * self._unit

    def lift(self, prices: np.ndarray, over: np.ndarray) -> None:
        """Lift the caps of prices at half of which a solution still exceeds the budget.

        If nothing fits, bounds grow with the prices until they show it.
        """
        for share, unit, price, more in zip(self._shares, self._unit, prices, over, strict=True):
            if more > 0 and price >= NEARER * share.ub() * unit:
                share.SetUb(BOX * share.ub())

    def mixture(self) -> Mixture:
        """Return the solutions that bound what is proven, by their shares in that: the duals of the program."""
        if not self._is_mixed:
            return ()
        shares = [(choices, abs(plane.dual_value())) for choices, plane in self._planes]
        whole = sum(share for _, share in shares)
        return tuple([(choices, share / whole) for choices, share in shares if share > ROUNDING * whole])
