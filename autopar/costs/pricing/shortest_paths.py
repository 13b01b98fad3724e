"""Shortest paths from all layouts to some, given the seconds of single moves as a matrix (inf: no such move)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.sharding.layout import Layout, P

LOCAL_MOVE_SECONDS = 1e-9  # breaks ties in favour of fewer moves; far below any real cost
ROUNDING = 1e-14  # relative: sums of the same seconds in another order differ by less


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The shortest distances, the next layout on the way from i to the j-th target, and on the way on from there."""

    targets: np.ndarray
    """Positions of the layouts that paths lead to, a column each."""
    seconds: np.ndarray
    following: np.ndarray
    later: np.ndarray
    """Two of them: behind a first move that does not gather, and behind one that does."""


def sum_along_paths(ways: Ways, each: np.ndarray, last: bool = False) -> np.ndarray:
    """Sum something over the single moves on each way, or take the last one's; 0 where there is no way."""
    here, there, total = np.arange(len(each))[:, None], ways.targets, np.zeros(ways.seconds.shape)
    columns = np.arange(len(there))
    while True:
        on_way = np.isfinite(ways.seconds) & (here != there)
        if not on_way.any():
            return total
        following = np.where(on_way, ways.following[here, columns], here)
        total += np.where(on_way & (following == there) if last else on_way, each[here, following], 0.0)
        here = following


def shortest_paths(seconds: np.ndarray, targets: np.ndarray | None = None) -> Ways:
    """Find the fastest paths from all layouts to targets (Bellman and Ford), given the seconds of single moves.

    A layout has few moves, so that going on by each of them is faster than going by way of every layout. Of paths that
    are equally fast, each begins with the move to the first layout.
    """
    targets = np.arange(len(seconds), dtype=np.int32) if targets is None else targets
    distance, following = seconds[:, targets], np.tile(targets, (len(seconds), 1))
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
    following[targets, np.arange(len(targets))] = targets
    return Ways(targets, distance, following, np.broadcast_to(following, (2, *following.shape)))


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
    """Return the paths that may go on by moves that make parts of a sum, between layouts of these positions.

    Where paths lead to parts, they also lead to what these are made of.
    """
    seconds, following = ways.seconds.copy(), ways.following.copy()
    column = {target: number for number, target in enumerate(ways.targets.tolist())}
    for before, after in sorted(to_parts.tolist(), key=lambda each: list(layouts[each[1]]).count(P)):
        if after not in column:
            continue
        here, there = column[before], column[after]
        through = seconds[:, here] + LOCAL_MOVE_SECONDS
        better = through < seconds[:, there]
        seconds[better, there] = through[better]
        following[better, there] = following[better, here]
        if better[before]:
            following[before, there] = after
    return Ways(ways.targets, seconds, following, ways.later)


def led_by(leading: np.ndarray, gathers: np.ndarray, on: Sequence[Ways]) -> Ways:
    """Return the paths that go `on` behind a first move of other seconds, which does not gather, or does."""
    targets, here = on[0].targets, np.arange(len(leading))
    distance = np.full((len(leading), len(targets)), np.inf)
    distance[targets, np.arange(len(targets))] = 0.0
    seconds = np.stack([each.seconds for each in on])
    first = np.tile(targets, (len(leading), 1))
    for after, each in _steps(leading):
        through = seconds[gathers[here, after].astype(int), after] + each
        better = through < distance
        np.copyto(distance, through, where=better)
        np.copyto(first, after[:, None], where=better)
    return Ways(targets, distance, first, np.stack([each.following for each in on]))
