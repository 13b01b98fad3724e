"""The memory row as a price: maximise  L(λ) = min_x [seconds(x) + λ bytes(x)] − λ budget  over λ ≥ 0.

L is concave and each evaluation is one elimination. Between a solution that is too large and one that fits, the next λ is
where both cost the same (a secant step); when nothing is cheaper there, L(λ) is the best bound a price can prove.
Both solutions are then optimal at λ, and so is every mixture of them that swaps whole connected regions: the mixture
that fills the budget best is the incumbent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.eliminate import Elimination, Tables, choices_of, evaluate, optimum
from autopar.problem import Problem

MAX_STEPS = 64
TOLERANCE = 1e-12  # of the seconds: below this two sums differ by rounding alone


@dataclass(frozen=True, slots=True)
class Point:
    """A choice per node with its seconds and bytes."""

    choices: tuple[int, ...]
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The price of memory in seconds per byte, the bound it proves, and the best solution met that fits."""

    multiplier: float
    bound: float
    incumbent: Point


def point(problem: Problem, choices: tuple[int, ...]) -> Point:
    return Point(choices, problem.seconds_of(choices), problem.bytes_of(choices))


def maximise_bound(
    problem: Problem, elimination: Elimination, tables: Tables, large: Point, small: Point, deadline: float
) -> Relaxation:
    """Secant steps from the optimum without the limit (`large`, over budget) and a solution that fits (`small`)."""
    budget = problem.budget
    assert budget is not None and large.num_bytes > budget >= small.num_bytes
    best = Relaxation(0.0, large.seconds, small)
    for _ in range(MAX_STEPS):
        price = max(0.0, (small.seconds - large.seconds) / (large.num_bytes - small.num_bytes))
        weighted = evaluate(elimination, tables.weighted(price))
        least = optimum(elimination, weighted)
        met = point(problem, choices_of(elimination, weighted))
        # Rounding in the table sums must not let the bound pass what it bounds.
        slack = TOLERANCE * (abs(least) + price * budget)
        bound = least - price * budget - slack
        fits = met.num_bytes <= budget
        incumbent = met if fits and met.seconds < best.incumbent.seconds else best.incumbent
        best = Relaxation(price, bound, incumbent) if bound > best.bound else _with_incumbent(best, incumbent)
        on_the_line = least >= small.seconds + price * small.num_bytes - 4 * slack
        if on_the_line or met in (large, small) or time.monotonic() > deadline:
            break
        large, small = (large, met) if fits else (met, small)
    mixed = mixture(problem, large, small)
    return _with_incumbent(best, min(best.incumbent, mixed, key=lambda each: each.seconds))


def mixture(problem: Problem, large: Point, small: Point) -> Point:
    """Start at `small` and take over connected regions of `large`, those that buy most seconds per byte first."""
    assert problem.budget is not None
    regions = [(_swapped(problem, small.choices, large.choices, region)) for region in _regions(problem, large, small)]
    gains = sorted(((small.seconds - p.seconds, p.num_bytes - small.num_bytes, r) for r, p in regions), key=_worth)
    choices, num_bytes = list(small.choices), small.num_bytes
    for seconds, added, region in gains:
        if seconds > 0 and num_bytes + added <= problem.budget:
            num_bytes += added
            for node in region:
                choices[node] = large.choices[node]
    return point(problem, tuple(choices))


def _worth(gain: tuple[float, int, tuple[int, ...]]) -> tuple[float, int, tuple[int, ...]]:
    seconds, added, region = gain
    return (-seconds / added if added > 0 else -float("inf"), -added, region)


def _with_incumbent(relaxation: Relaxation, incumbent: Point) -> Relaxation:
    return Relaxation(relaxation.multiplier, relaxation.bound, incumbent)


def _regions(problem: Problem, large: Point, small: Point) -> list[tuple[int, ...]]:
    """Connected sets of nodes in which the two solutions differ."""
    around: dict[int, list[int]] = {
        node: [] for node, pair in enumerate(zip(large.choices, small.choices, strict=True)) if pair[0] != pair[1]
    }
    for edge in problem.edges:
        if edge.source in around and edge.target in around:
            around[edge.source].append(edge.target)
            around[edge.target].append(edge.source)
    regions: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for start in around:
        if start in seen:
            continue
        seen.add(start)
        region = [start]
        for node in region:
            new = [other for other in dict.fromkeys(around[node]) if other not in seen]
            seen.update(new)
            region.extend(new)
        regions.append(tuple(region))
    return regions


def _swapped(
    problem: Problem, choices: Sequence[int], others: Sequence[int], region: tuple[int, ...]
) -> tuple[tuple[int, ...], Point]:
    """The region, and `choices` with the choices of `others` inside it."""
    swapped = list(choices)
    for node in region:
        swapped[node] = others[node]
    return region, point(problem, tuple(swapped))
