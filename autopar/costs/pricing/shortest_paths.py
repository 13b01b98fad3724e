"""Shortest paths between layouts, given the seconds of single moves as a matrix (inf: no such move)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.sharding.layout import Layout, P

LOCAL_MOVE_SECONDS = 1e-9  # breaks ties in favour of fewer moves; far below any real cost
ROUNDING = 1e-14  # relative: sums of the same seconds in another order differ by less


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The shortest distances, the next layout on the way from i to j, and on the way on from there."""

    seconds: np.ndarray
    following: np.ndarray
    later: np.ndarray
    """Two of them: behind a first move that does not gather, and behind one that does."""


def sum_along_paths(ways: Ways, each: np.ndarray, last: bool = False) -> np.ndarray:
    """Sum something over the single moves on each way, or take the last one's; 0 where there is no way."""
    there = np.broadcast_to(np.arange(len(each)), each.shape)
    here, total = there.T, np.zeros(each.shape)
    while True:
        on_way = np.isfinite(ways.seconds) & (here != there)
        if not on_way.any():
            return total
        following = np.where(on_way, ways.following[here, there], here)
        total += np.where(on_way & (following == there) if last else on_way, each[here, following], 0.0)
        here = following


def all_pairs(seconds: np.ndarray) -> Ways:
    """Find the fastest paths between all pairs of layouts (Bellman and Ford), given the seconds of single moves.

    A layout has few moves, so that going on by each of them is faster than going by way of every layout. Of paths that
    are equally fast, each begins with the move to the first layout.
    """
    distance, following = seconds.copy(), np.tile(np.arange(len(seconds), dtype=np.int32), (len(seconds), 1))
    steps = _steps(seconds)
    while True:
        before = distance.copy()
        for after, each in steps:
            np.minimum(distance, distance[after] + each, out=distance)
        if np.array_equal(before, distance):
            break
    most = distance * (1 + ROUNDING)
    for after, each in reversed(steps):
        np.copyto(following, after[:, None], where=distance[after] + each <= most)
    np.fill_diagonal(following, np.arange(len(seconds)))
    return Ways(distance, following, np.stack([following, following]))


def _steps(seconds: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the first, the second, … layout that each layout moves to, with the seconds in a column; inf if it has
    fewer moves.
    """
    here = np.arange(len(seconds), dtype=np.int32)
    before, after = np.nonzero(np.isfinite(seconds) & (here[:, None] != here))
    number = np.arange(len(before)) - np.searchsorted(before, before)
    found = np.tile(here, (number.max(initial=-1) + 1, 1))
    found[number, before] = after
    return [(each, np.where(each == here, np.inf, seconds[here, each])[:, None]) for each in found]


def ending_in_parts(ways: Ways, to_parts: np.ndarray, layouts: Sequence[Layout]) -> Ways:
    """Return the paths that may go on by moves that make parts of a sum, between layouts of these positions."""
    seconds, following = ways.seconds.copy(), ways.following.copy()
    for before, after in sorted(to_parts.tolist(), key=lambda each: list(layouts[each[1]]).count(P)):
        through = seconds[:, before] + LOCAL_MOVE_SECONDS
        better = through < seconds[:, after]
        seconds[better, after] = through[better]
        following[better, after] = following[better, before]
        if better[before]:
            following[before, after] = after
    return Ways(seconds, following, ways.later)


def led_by(leading: np.ndarray, gathers: np.ndarray, on: Sequence[Ways]) -> Ways:
    """Return the paths that go `on` behind a first move of other seconds, which does not gather, or does."""
    distance, here = np.full_like(leading, np.inf), np.arange(len(leading))
    np.fill_diagonal(distance, 0.0)
    seconds = np.stack([each.seconds for each in on])
    first = np.tile(here.astype(np.int32), (len(distance), 1))
    for after, each in _steps(leading):
        through = seconds[gathers[here, after].astype(int), after] + each
        better = through < distance
        np.copyto(distance, through, where=better)
        np.copyto(first, after[:, None], where=better)
    return Ways(distance, first, np.stack([each.following for each in on]))
