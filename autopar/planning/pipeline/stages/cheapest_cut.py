"""The cheapest cut of a row of blocks into stages, when each stage costs, and the slowest of a pass once more.

`fill[s, i, j]` and `table[s, i, j]` are what stage s costs and how slow it is with the blocks i to j - 1, infinite
where that is not allowed. Stages come in passes of `per_pass`. The cut that is found minimizes

    sum over stages of fill  +  pace * sum over passes of (max over the stages of the pass of table)

Alpa (Zheng et al., OSDI 2022, section 5.2) enumerates the maximum and solves one dynamic program for each. Here one
program runs over the stages and keeps, for every block that the next stage can begin with, the pairs (cost so far,
slowest of this pass so far) of which no other is better in both. A pair is dropped if even a lower bound on its
completion is not below a cut already known; the slowest so far is raised to what the rest of the pass needs at least,
which makes many pairs equal. All three keep a cut of least cost, up to `_EQUAL` of it. Of cuts that cost the same, as
all may with one micro-batch, it is the one with the fastest slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_EQUAL = 1e-12
"""Relative: what float sums in another order differ by."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """After some stages: cost so far and slowest of the pass, by the first block of the next stage (ascending)."""

    cost: Floats
    slowest: Floats
    block: Integers
    before: Integers
    """The pair of the stage before that this one continues."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Lower bounds [stage, first block] for stages from there on: cost, mean of the pass included or not; slowest."""

    with_mean: Floats
    without: Floats
    slowest: Floats


def cheapest_cut(fill: Floats, table: Floats, per_pass: int, pace: float) -> tuple[int, ...] | None:
    """Return the first blocks of the stages of a cheapest cut; None if no cut has a finite cost."""
    num_stages, num_blocks = len(table), table.shape[1] - 1
    even = _most_even(table)
    if even is None:
        return None
    rows = (np.arange(num_stages), np.array(even), np.array([*even[1:], num_blocks]))
    paces = table[rows].reshape(-1, per_pass).max(axis=1)
    known = float(fill[rows].sum() + pace * paces.sum()) * (1 + _EQUAL)
    bounds = _bounds(fill, table, per_pass, pace)
    start = np.zeros(1)
    pairs = [_Pairs(start, start, np.zeros(1, np.int64), np.zeros(1, np.int64))]
    for stage in range(num_stages):
        ends_pass = (stage + 1) % per_pass == 0
        found = []
        for end in range(stage + 1, num_blocks + 1):
            if not np.isfinite(bounds.with_mean[stage + 1, end]):
                continue
            begun = np.flatnonzero(np.isfinite(table[stage, pairs[-1].block, end]))
            seconds = table[stage, pairs[-1].block[begun], end]
            cost = pairs[-1].cost[begun] + fill[stage, pairs[-1].block[begun], end]
            most = np.maximum(pairs[-1].slowest[begun], seconds)
            if ends_pass:
                cost, most = cost + pace * most, np.zeros(len(begun))
            else:
                most = np.maximum(most, bounds.slowest[stage + 1, end])
            least = cost + np.maximum(bounds.with_mean[stage + 1, end], pace * most + bounds.without[stage + 1, end])
            rows = np.flatnonzero(least <= known)
            rows = rows[_undominated(cost[rows], most[rows], known * _EQUAL)]
            found.append(_Pairs(cost[rows], most[rows], np.full(len(rows), end), begun[rows]))
        pairs.append(_joined(found))
    return even if pairs[-1].cost.min() * (1 + _EQUAL) ** 2 >= known else _starts(pairs)


def _most_even(table: Floats) -> tuple[int, ...] | None:
    """Return the cut with the least total among those with the fastest slowest stage: the first incumbent."""
    reached = np.full(table.shape[1], np.inf)
    reached[0] = 0.0
    for stage in table:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    if not np.isfinite(reached[-1]):
        return None
    within = np.where(table <= reached[-1], table, np.inf)
    sums, choices = np.full(table.shape[1], np.inf), []
    sums[0] = 0.0
    for stage in within:
        through = sums[:, None] + stage
        choices.append(through.argmin(axis=0))
        sums = through.min(axis=0)
    starts, end = [], table.shape[1] - 1
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return tuple(reversed(starts))


def _bounds(fill: Floats, table: Floats, per_pass: int, pace: float) -> _Bounds:
    """Lower bounds on what follows: the slowest of r stages is at least their mean, and at least the slowest so far."""
    num_stages, width = len(table), table.shape[1]
    shape = (num_stages + 1, width)
    with_mean, without, most = np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf)
    paced = np.full_like(table, np.inf)
    np.multiply(pace, table, out=paced, where=np.isfinite(table))  # 0 * inf is not a number
    with_mean[-1, -1] = without[-1, -1] = most[-1, -1] = 0.0
    for first in range(num_stages - per_pass, -1, -per_pass):
        end = first + per_pass
        after = with_mean[end]
        without_after, most_after = after, np.where(np.isfinite(after), 0.0, np.inf)
        for stage in range(end - 1, first - 1, -1):
            without_after = without[stage] = _cost_through(fill[stage], without_after)
            most_after = most[stage] = np.maximum(table[stage], most_after[None, :]).min(axis=1)
            mean = after
            for other in range(end - 1, stage - 1, -1):
                mean = _cost_through(fill[other] + paced[other] / (end - stage), mean)
            with_mean[stage] = mean
    for first in range(0, num_stages + 1, per_pass):
        without[first] = with_mean[first]
    return _Bounds(with_mean, without, most)


def _cost_through(costs: Floats, after: Floats) -> Floats:
    """Return the least cost from every first block: one stage, and what comes `after` its end."""
    return (costs + after[None, :]).min(axis=1)


def _undominated(cost: Floats, slowest: Floats, equal: float) -> Integers:
    """Return the pairs of which no other is better in both, by more than `equal` in cost."""
    order = np.lexsort((cost, slowest))
    best = np.minimum.accumulate(cost[order])
    better = np.ones(len(order), dtype=bool)
    better[1:] = cost[order][1:] < best[:-1] - equal
    return order[better]


def _joined(found: Sequence[_Pairs]) -> _Pairs:
    """Return the pairs of all ends of one stage."""
    return _Pairs(
        np.concatenate([each.cost for each in found]),
        np.concatenate([each.slowest for each in found]),
        np.concatenate([each.block for each in found]),
        np.concatenate([each.before for each in found]),
    )


def _starts(pairs: Sequence[_Pairs]) -> tuple[int, ...]:
    """Trace the first blocks of stages back from the cheapest pair that has all blocks."""
    rows = np.flatnonzero(pairs[-1].block == pairs[-1].block.max())
    row, starts = int(rows[pairs[-1].cost[rows].argmin()]), []
    for now, before in zip(reversed(pairs), reversed(pairs[:-1]), strict=False):
        row = int(now.before[row])
        starts.append(int(before.block[row]))
    return tuple(reversed(starts))
