"""Shortest paths between layouts: as short as walks through every layout, and the same one of those equally short."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.costs.pricing.shortest_paths import Ways, shortest_paths, sum_along_paths


def moves(seed: int, count: int = 12) -> np.ndarray:
    """Return seconds of random single moves, many of them equal."""
    random = np.random.default_rng(seed)
    seconds = random.choice([0.1, 0.2, 0.3, 0.7], size=(count, count))
    seconds[random.random((count, count)) < 0.7] = np.inf
    np.fill_diagonal(seconds, 0.0)
    return seconds


def through_every_layout(seconds: np.ndarray) -> np.ndarray:
    """Return the least seconds by Floyd and Warshall."""
    found = seconds.copy()
    for middle in range(len(found)):
        found = np.minimum(found, found[:, middle, None] + found[None, middle])
    return found


def walk(ways: Ways, here: int, there: int) -> list[int]:
    found = [here]
    while found[-1] != there:
        found.append(int(ways.following[found[-1], there]))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_paths_are_as_short_as_walks_through_every_layout(seed: int) -> None:
    seconds = moves(seed)
    ways = shortest_paths(seconds)
    np.testing.assert_allclose(ways.seconds, through_every_layout(seconds), rtol=1e-12)
    for here, there in np.argwhere(np.isfinite(ways.seconds)):
        path = walk(ways, here, there)
        assert sum(seconds[a, b] for a, b in itertools.pairwise(path)) == pytest.approx(ways.seconds[here, there])


@pytest.mark.parametrize("seed", range(5))
def test_paths_to_some_targets_are_those_among_all(seed: int) -> None:
    seconds, targets = moves(seed), np.array([7, 2, 4])
    ways, of_all = shortest_paths(seconds, targets), shortest_paths(seconds)
    np.testing.assert_array_equal(ways.seconds, of_all.seconds[:, targets])
    reached = np.isfinite(ways.seconds)
    np.testing.assert_array_equal(ways.following[reached], of_all.following[:, targets][reached])
    np.testing.assert_array_equal(sum_along_paths(ways, seconds), sum_along_paths(of_all, seconds)[:, targets])


def test_paths_begin_with_the_first_of_moves_that_are_as_short_but_for_rounding() -> None:
    """Check that the order in which 0.1, 0.2 and 0.3 are added decides nothing."""
    seconds = np.full((6, 6), np.inf)
    np.fill_diagonal(seconds, 0.0)
    assert (0.1 + 0.2) + 0.3 > 0.1 + (0.2 + 0.3)
    seconds[0, 1], seconds[1, 2], seconds[2, 5] = 0.3, 0.2, 0.1
    seconds[0, 3], seconds[3, 4], seconds[4, 5] = 0.1, 0.2, 0.3
    assert walk(shortest_paths(seconds), 0, 5) == [0, 1, 2, 5]
    swapped = [0, 3, 4, 1, 2, 5]
    assert walk(shortest_paths(seconds[np.ix_(swapped, swapped)]), 0, 5) == [0, 1, 2, 5]
