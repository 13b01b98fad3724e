"""The memory row as a price: maximise  L(λ) = min_x [seconds(x) + λ bytes(x)] − λ budget  over λ ≥ 0.

L is concave and each evaluation is one elimination. Between a solution that is too large and one that fits, the next
λ is where both cost the same (a secant step); when nothing is cheaper there, L(λ) is the best bound a price can prove.
Both solutions are then optimal at λ, and so is every mixture of them that swaps whole connected regions: the mixture
that fills the budget best is the incumbent; mixtures of fewer regions take less memory, and cost little more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import TimeLimitError
from autopar.solver.deadline import NEVER, is_over
from autopar.solver.elimination.bucket_elimination import Elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import choices_of, evaluate, optimum
from autopar.solver.problem import Floats, Problem

MAX_STEPS = 64
WORTHWHILE = 5e-6  # of the bound: what a better price could prove, and no longer looked for
TOLERANCE = 1e-12  # of the seconds: below this two sums differ by rounding alone


@dataclass(frozen=True, slots=True)
class Point:
    """A choice per node with its seconds and bytes."""

    choices: tuple[int, ...]
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Price of memory in seconds per byte, the bound it proves, and the best visited solution that fits."""

    multiplier: float
    bound: float
    incumbent: Point
    smaller: tuple[Point, ...] = ()
    """Other solutions that fit, each of fewer bytes than the one before."""

    def with_mixtures(self, found: Sequence[Point]) -> Relaxation:
        """Return the same with further solutions that fit, those of more bytes first."""
        best = min(self.incumbent, found[0], key=lambda each: each.seconds)
        return replace(self, incumbent=best, smaller=tuple(found[1:]))

    def or_better(self, other: Relaxation) -> Relaxation:
        """Return the better bound with its price, and the faster solution."""
        best = other if other.bound > self.bound else self
        return replace(best, incumbent=min(self.incumbent, other.incumbent, key=lambda each: each.seconds))


NOTHING = Point((), math.inf, 0)
"""No solution."""


def point(problem: Problem, choices: tuple[int, ...]) -> Point:
    return Point(choices, *problem.cost_of(choices))


Least = Callable[[float], tuple[float, Point | None]]
"""Price → a bound on seconds + price · bytes of any choices, and the choices that attain it (None: none found)."""


def is_closed(seconds: float, bound: float, gap: float) -> bool:
    """Return whether `seconds` exceeds a bound by at most the relative gap; False if no solution was found yet."""
    return seconds < math.inf and seconds - bound <= gap * abs(seconds)


@dataclass(slots=True, eq=False)
class Visited:
    """Results of elimination at memory prices, whatever the budget, and the tables of the last price."""

    points: dict[float, tuple[float, Point | None]] = field(default_factory=dict)
    """Price → what `Least` says there; at an infinite one the fewest bytes, and choices that take no more."""
    price: float = math.nan
    evaluated: list[Floats] = field(default_factory=list)
    """Tables that `evaluate` returned at that price: up to 1.5 GB."""

    def taken(self, price: float) -> list[Floats] | None:
        """Return the tables if they are those of this price; they are not kept here any longer."""
        is_known, evaluated = self.price == price, self.evaluated
        self.forget()
        return evaluated if is_known else None

    def forget(self) -> None:
        """Keep the tables no longer."""
        self.price, self.evaluated = math.nan, []


class LeastByElimination:
    """Exact at every price, by one evaluation each.

    `visited` holds the visited solutions of another search in the same tables, whatever its budget; more are added.
    """

    def __init__(
        self,
        problem: Problem,
        elimination: Elimination,
        tables: Tables,
        deadline: float = NEVER,
        visited: Visited | None = None,
    ) -> None:
        self._deadline = deadline
        self._visited = Visited() if visited is None else visited
        self._problem = problem
        self._elimination = elimination
        self.tables = tables

    def evaluated(self, price: float) -> list[Floats]:
        """Return the tables of seconds + price · bytes and the messages of all steps, as `evaluate` returns them.

        TimeLimitError where that takes until the deadline.
        """
        if price != self._visited.price:
            self._visited.evaluated = evaluate(self._elimination, self.tables.weighted(price), self._deadline)
            self._visited.price = price
        return self._visited.evaluated

    def __call__(self, price: float) -> tuple[float, Point | None]:
        if price not in self._visited.points:
            self._visited.points[price] = self._least(self.evaluated(price))
        return self._visited.points[price]

    def smallest(self) -> Point | None:
        """Return the choices of the fewest bytes; None where everything is forbidden. Raises as `evaluated`."""
        if math.inf not in self._visited.points:
            found = evaluate(self._elimination, self.tables.bytes_only(), self._deadline)
            self._visited.points[math.inf] = self._least(found)
        return self._visited.points[math.inf][1]

    def _least(self, evaluated: Sequence[Floats]) -> tuple[float, Point | None]:
        reached = optimum(self._elimination, evaluated)
        return reached, point(self._problem, choices_of(self._elimination, evaluated)) if reached < math.inf else None


def maximise_bound(
    problem: Problem,
    least: Least,
    start: Relaxation,
    large: Point,
    small: Point,
    deadline: float,
    near: float = 0.0,
    cutoff: float = math.inf,
) -> Relaxation:
    """Secant steps between a solution over budget (`large`) and one that fits (`small`); `start` is what is known.

    They end early where the best solution is `near` the bound, as a share of it: then there are cheaper ways to go on.
    A bound as high as the `cutoff` ends them, too.
    """
    budget = problem.budget
    assert budget is not None and large.num_bytes > budget >= small.num_bytes
    best = replace(start, incumbent=min(start.incumbent, small, key=lambda each: each.seconds))
    for _ in range(MAX_STEPS):
        price = max(0.0, (small.seconds - large.seconds) / (large.num_bytes - small.num_bytes))
        try:
            reached, visited = least(price)
        except TimeLimitError:
            break
        best = best.or_better(priced(reached, price, budget, visited))
        if visited is None:
            break
        # Both solutions cost that much at this price, so no price between theirs proves more (L is concave).
        missing = small.seconds + price * small.num_bytes - reached
        allowed = max(4 * _slack(reached, price, budget), WORTHWHILE * abs(best.bound))
        settled = missing <= allowed or visited in (large, small) or best.bound >= cutoff
        if settled or is_over(deadline):
            break
        large, small = (large, visited) if visited.num_bytes <= budget else (visited, small)
        if near:
            best = best.with_mixtures(mixtures(problem, large, small))
            if is_closed(best.incumbent.seconds, best.bound, near):
                return best
    return best.with_mixtures(mixtures(problem, large, small))


def priced(reached: float, price: float, budget: int, visited: Point | None) -> Relaxation:
    """Return the bound that an evaluation at a price proves, with the solution it visited if that fits."""
    # Rounding in the table sums must not let the bound pass what it bounds.
    bound = reached - price * budget - _slack(reached, price, budget)
    return Relaxation(price, bound, visited if visited is not None and visited.num_bytes <= budget else NOTHING)


def _slack(reached: float, price: float, budget: int) -> float:
    return TOLERANCE * (abs(reached) + price * budget)


def mixtures(problem: Problem, large: Point, small: Point) -> list[Point]:
    """Start at `small` and take over connected regions of `large`, those that buy most seconds per byte first.

    First with all regions that fit, then with one less, two, four …, and `small` itself. No edge joins two regions, so
    their gains add up.
    """
    assert problem.budget is not None
    region_of = regions(problem, large.choices, small.choices)
    saved = [0.0] * (1 + max(region_of.values(), default=-1))
    added = [0] * len(saved)
    for node, region in region_of.items():
        candidates, before, after = problem.nodes[node], small.choices[node], large.choices[node]
        saved[region] += float(candidates.seconds[before] - candidates.seconds[after])
        added[region] += int(candidates.num_bytes[after] - candidates.num_bytes[before])
    for edge in problem.edges:
        region = next((region_of[end] for end in edge.ends if end in region_of), -1)
        if region >= 0:
            before, after = (tuple(each.choices[end] for end in edge.ends) for each in (small, large))
            saved[region] += float(edge.seconds[before] - edge.seconds[after])
            if edge.num_bytes is not None:
                added[region] += int(edge.num_bytes[after] - edge.num_bytes[before])
    taken: list[int] = []
    num_bytes = small.num_bytes
    for region in sorted(range(len(saved)), key=lambda r: (-saved[r] / added[r] if added[r] > 0 else -math.inf, r)):
        if saved[region] > 0 and num_bytes + added[region] <= problem.budget:
            num_bytes += added[region]
            taken.append(region)
    fewer = [0, *(2**power for power in range(len(taken).bit_length()) if 2**power < len(taken)), len(taken)]
    return [_mixed(problem, large, small, region_of, set(taken[: len(taken) - less])) for less in dict.fromkeys(fewer)]


def _mixed(problem: Problem, large: Point, small: Point, region_of: Mapping[int, int], taken: set[int]) -> Point:
    """Return the smaller solution with some regions of the larger one."""
    choices = (
        large.choices[node] if region_of.get(node) in taken else choice for node, choice in enumerate(small.choices)
    )
    return point(problem, tuple(choices))


def regions(problem: Problem, large: Sequence[int], small: Sequence[int]) -> dict[int, int]:
    """Return the nodes in which the two solutions differ, with the number of the connected region each lies in."""
    pairs = enumerate(zip(large, small, strict=True))
    around: dict[int, list[int]] = {node: [] for node, (one, other) in pairs if one != other}
    for edge in problem.edges:
        changed = [end for end in edge.ends if end in around]
        for one, other in itertools.combinations(changed, 2):
            around[one].append(other)
            around[other].append(one)
    region_of: dict[int, int] = {}
    num_regions = 0
    for start in around:
        if start in region_of:
            continue
        left = [start]
        while left:
            node = left.pop()
            if node not in region_of:
                region_of[node] = num_regions
                left.extend(around[node])
        num_regions += 1
    return region_of
