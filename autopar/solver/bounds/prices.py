"""The prices of several memory rows that prove most, by cutting planes (Kelley 1960).

    L(λ) = min_x [seconds(x) + Σ_r λ_r (bytes_r(x) − budget_r)]        λ ≥ 0

Every visited x bounds L from above, and the next prices lie halfway to those that are best against all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.errors import TimeLimitError
from autopar.solver.deadline import is_over
from autopar.solver.lagrangian import is_closed, regions
from autopar.solver.problem import Floats, Integers, Problem

MAX_PLANES = 60  # evaluations in search of prices
NEARER = 0.5  # of the way from the best prices to those that are best against all visited solutions
BOX = 16.0  # times the prices to begin with: further ones are not looked at
LEAST_BOX = 0.1  # of the bound: what all memory costs at such prices at least
WIDER, EDGE = 4.0, 0.99  # growth of a radius, and where in it prices are at its edge
SETTLED = 1.5  # times the gap between a bound and its choices: a smaller gain is not due to a better price
NEARBY = 4  # evaluations near the best prices, while they find new choices and none is good enough
PATIENCE = 5  # evaluations in a row that prove no more
ROUGHLY, CLOSER = 5e-3, 10.0  # of the bound: largest gap at which mixtures are first checked; growth of that threshold
LEAST_SHARE = 1e-6  # of a mixture: smaller ones are rounding
WORTHWHILE = 5e-6  # of the bound: what better prices could prove, and no longer looked for


Mixture = tuple[tuple[tuple[int, ...], float], ...]
"""Choices with weights that add up to one: on average they are within all budgets, and no better average is known."""
OverElsewhere = Callable[[Mixture], bool]
"""Predicate that is true if a mixture exceeds a budget that is no row of the problems."""


def nowhere(mixture: Mixture) -> bool:
    """Return False: all budgets are rows, or other budgets do not matter."""
    return False


class PricedRows(Protocol):
    """Problems with a memory row each, ready to be evaluated at prices of them all."""

    @property
    def problems(self) -> Sequence[Problem]: ...

    def at(
        self, prices: tuple[float, ...], known_bound: float = -np.inf, sufficient: float = np.inf
    ) -> tuple[float, tuple[int, ...] | None]:
        """L(λ) or a bound on it, and choices that attain it, or nearly; None where none were found.

        Where L(λ) is no more than what is `known_bound`, any choices that show it will do, as will a bound that is
        `sufficient`.
        """
        ...

    def cost(self, choices: Sequence[int]) -> tuple[float, Integers]:
        """Return the seconds of choices, and their bytes in each row."""
        ...


@dataclass(frozen=True, slots=True)
class BestPrices:
    """Prices, their bound, the fastest visited solution within all budgets, and all visited solutions.

    The best prices are those at which what is mixed of the solutions costs the same.
    """

    prices: tuple[float, ...]
    bound: float
    choices: tuple[int, ...] | None
    seconds: float
    visited: tuple[tuple[int, ...], ...] = ()
    mixture: Mixture = ()
    is_over_elsewhere: bool = False
    """True if the mixture exceeds a budget that is no row."""

    def or_faster(self, choices: tuple[int, ...], seconds: float, over: np.ndarray) -> BestPrices:
        """Return the same with choices that take so many seconds, if they are faster and within all budgets."""
        is_better = (over <= 0).all() and seconds < self.seconds
        return replace(self, choices=choices, seconds=seconds) if is_better else self


def best_prices(
    rows: PricedRows,
    start: tuple[float, ...],
    scale: float,
    constant: float,
    gap: float,
    deadline: float,
    radius: float = math.inf,
    worthwhile: float = WORTHWHILE,
    visited: Sequence[Sequence[int]] = (),
    cutoff: float = math.inf,
    wide_gap: float = 0.0,
    is_over_elsewhere: OverElsewhere = nowhere,
) -> BestPrices:
    """Return the prices with the highest bound, and the fastest visited solution within all budgets.

    `constant` seconds are added to each solution; one within the gap is enough. Prices are looked for within a `radius`
    (a share of `scale` seconds that a full row costs), which grows where they end at its edge, and no longer where
    better ones could prove less than a `worthwhile` share. `visited` are choices visited earlier: without initial
    prices, they determine the start. A bound as high as the `cutoff` ends the search, as does a solution that is within
    a gap of `wide_gap`, if that is more: at one price evaluations that are not exact go on for the gap, but no further
    price is. From time to time the mixture at near-optimal prices is checked against the budgets that are not rows. The
    search ends if it exceeds one: with that row, other prices are optimal.
    """
    budgets = np.array([each.budget for each in rows.problems], dtype=np.float64)
    cost = float(np.dot(start, budgets))
    seen: list[tuple[tuple[int, ...], float, Floats]] = []
    for each in visited:
        seconds, row_bytes = rows.cost(each)
        seen.append((tuple(each), seconds, row_bytes - budgets))
    best = BestPrices(start, -np.inf, None, np.inf)
    for choices, seconds, over in seen:
        best = best.or_faster(choices, seconds, over)
    seen = seen if best.choices is not None else seen[:1]  # misfits say little about prices
    widest = math.inf if best.choices is not None else max(2 * cost, radius * scale)
    planes = _Planes(budgets, max(BOX * max(cost, LEAST_BOX * scale), 1e-300), widest)
    for choices, seconds, over in seen:
        _, wanted = planes.after(choices, seconds, over)
        if not cost:
            start = tuple((NEARER * wanted).tolist())
        if best.choices is not None:
            best = filled(rows, replace(best, prices=start), choices)
    prices, open_there, stalled, requested = start, math.inf, 0, ROUGHLY * scale
    is_expensive = radius < math.inf  # evaluations are, and not exact
    nearby, is_nearby, known_bound = NEARBY if is_expensive else 0, False, {seconds for _, seconds, _ in seen}
    for _ in range(MAX_PLANES):
        try:
            sufficient = min((1 - gap) * (best.seconds + constant) - constant, cutoff)
            reached, choices = rows.at(prices, best.bound, sufficient)
        except TimeLimitError:
            break
        if choices is None:
            return replace(best, prices=prices, bound=reached) if reached > best.bound else best
        is_new = choices not in best.visited
        if is_new:
            best = replace(best, visited=(*best.visited, choices))
        seconds, row_bytes = rows.cost(choices)
        over = row_bytes - budgets
        stalled = 0 if reached > best.bound + worthwhile * scale else stalled + 1
        if reached > best.bound:
            # At these prices no more is proven than what the choices cost there.
            best = replace(best, prices=prices, bound=reached)
            open_there = seconds + float(np.dot(prices, over)) - reached
        best = best.or_faster(choices, seconds, over)
        if best.choices is not None and is_expensive:
            best = filled(rows, best, choices)
        most, wanted = planes.after(choices, seconds, over)
        is_near = is_closed(best.seconds + constant, best.bound + constant, max(gap, wide_gap)) or best.bound >= cutoff
        is_stalled = stalled >= PATIENCE and open_there > worthwhile * scale  # where evaluations are not exact
        is_settled = most - best.bound <= max(worthwhile * scale, SETTLED * open_there)
        is_done = is_settled and (not nearby or (is_nearby and seconds in known_bound))
        if is_near or is_stalled or is_done or is_over(deadline):
            break
        if most - best.bound <= requested:
            requested = (most - best.bound) / CLOSER
            if is_over_elsewhere(planes.mixture()):
                return replace(best, mixture=planes.mixture(), is_over_elsewhere=True)
        known_bound.add(seconds)
        # Where prices prove hardly more, there may be better choices at those where the best known cost the same.
        is_nearby, nearby = is_settled, nearby - is_settled
        # Visited choices add no information: the optimum against them is proven there, or new choices are visited.
        share = 1.0 if is_nearby or not (is_new or is_expensive) else NEARER
        prices = tuple((share * wanted + (1 - share) * np.array(best.prices)).tolist())
    return replace(best, mixture=planes.mixture())


def filled(rows: PricedRows, best: BestPrices, other: Sequence[int]) -> BestPrices:
    """Return the best known with those parts of other choices that make it faster within all budgets, best bargains
    first.

    Parts are the connected regions in which the two differ: no edge joins two, so that what they save and add sums up.
    """
    problems, small = rows.problems, best.choices
    assert small is not None
    region_of = regions(problems[0], other, small)
    saved = np.zeros(1 + max(region_of.values(), default=-1))
    added = np.zeros((len(problems), len(saved)), dtype=np.int64)
    for node, region in region_of.items():
        before, after = small[node], other[node]
        saved[region] += problems[0].nodes[node].seconds[before] - problems[0].nodes[node].seconds[after]
        added[:, region] += [
            each.nodes[node].num_bytes[after] - each.nodes[node].num_bytes[before] for each in problems
        ]
    for number, edge in enumerate(problems[0].edges):
        region = next((region_of[end] for end in edge.ends if end in region_of), -1)
        if region >= 0:
            before, after = (tuple([choices[end] for end in edge.ends]) for choices in (small, other))
            saved[region] += edge.seconds[before] - edge.seconds[after]
            row_bytes = (each.edges[number].num_bytes for each in problems)
            added[:, region] += [0 if each is None else each[after] - each[before] for each in row_bytes]
    paid = np.array(best.prices) @ added
    budgets = np.array([each.budget or 0 for each in problems])
    left = budgets - rows.cost(small)[1]
    chosen = list(small)
    taken = set()
    for region in sorted(range(len(saved)), key=lambda r: (-saved[r] / paid[r] if paid[r] > 0 else -math.inf, r)):
        if saved[region] > 0 and (added[:, region] <= left).all():
            left -= added[:, region]
            taken.add(region)
    for node, region in region_of.items():
        chosen[node] = other[node] if region in taken else small[node]
    seconds, row_bytes = rows.cost(chosen)
    is_better = (row_bytes <= budgets).all() and seconds < best.seconds
    return replace(best, choices=tuple(chosen), seconds=seconds) if is_better else best


class _Planes:
    """Linear program over prices; each visited solution is an upper bound on what they prove."""

    def __init__(self, budgets: np.ndarray, box: float, radius: float) -> None:
        """A full row costs no more than `box` seconds at any price, and at first no more than `radius`."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        assert solver is not None
        self._solver, self._unit = solver, np.maximum(box / np.maximum(budgets, 1.0), 1e-300)
        self._most = min(radius / box, 1.0)
        self._shares = [solver.NumVar(0.0, self._most, "") for _ in budgets]
        self._bound = solver.NumVar(-solver.infinity(), solver.infinity(), "")
        solver.Maximize(self._bound)
        self._planes: list[tuple[tuple[int, ...], pywraplp.Constraint]] = []
        self._is_mixed = False
        """True if the linear program is solved, at prices within the radius; its mixture is then within all budgets."""

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
        if self._most < 1.0 and found.max(initial=0.0) > EDGE * self._most:
            self._most, self._is_mixed = min(WIDER * self._most, 1.0), False
            for share in self._shares:
                share.SetUb(self._most)
        return bound, found * self._unit

    def mixture(self) -> Mixture:
        """Return the solutions that bound the most that is proven, by their shares in that: the duals of the program.

        Nothing where prices ended at the edge of their radius, as what is mixed there is over the budgets.
        """
        if not self._is_mixed:
            return ()
        shares = [(choices, abs(plane.dual_value())) for choices, plane in self._planes]
        whole = sum(share for _, share in shares)
        return tuple([(choices, share / whole) for choices, share in shares if share > LEAST_SHARE * whole])
