"""Choices combined from visited ones are the best of all that take no other strategies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.solver.deadline import NEVER
from autopar.solver.memory_rows import crossing
from autopar.solver.memory_rows.crossing import crossed, taken_by
from autopar.solver.memory_rows.priced_rows import Rows
from autopar.solver.problem import Edge, Node, Problem

LAYERS = 6
WAYS = 3
WIDE = (0.1, 5.0)  # margins: a change costs much of so few layers


def _layers(seed: int, share: float) -> list[Problem]:
    """Equal layers with some ways to lay each out, of which one is fast, one small, and to change costs time.

    Two memory rows: one of all layers, one of the later ones.
    """
    random = np.random.default_rng(seed)
    seconds, num_bytes = np.array([1.0, 1.3, 2.0]), np.array([9, 5, 1])
    change = np.where(np.eye(WAYS, dtype=bool), 0.0, random.uniform(0.3, 0.9))
    edges = tuple(Edge((layer, layer + 1), change) for layer in range(LAYERS - 1))
    rows = []
    for first in (0, LAYERS // 2):
        row_bytes = [num_bytes if layer >= first else np.zeros_like(num_bytes) for layer in range(LAYERS)]
        nodes = tuple(Node(str(layer), seconds, each) for layer, each in enumerate(row_bytes))
        most = int(sum(each.max() for each in row_bytes))
        rows.append(Problem(nodes, edges, int(share * most)))
    return rows


@pytest.mark.parametrize("share", [0.4, 0.8])
@pytest.mark.parametrize("visited", [((0,) * LAYERS, (2,) * LAYERS), ((0,) * LAYERS, (1,) * LAYERS, (2,) * LAYERS)])
def test_what_is_made_is_the_best_of_what_was_visited(
    share: float, visited: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossing, "MARGINS", WIDE)
    gained = []
    for seed in range(3):
        problems = _layers(seed, share)
        rows = Rows.of(problems, NEVER, np.inf)
        assert rows is not None
        bound, _ = rows.at((0.0, 0.0))
        made = crossed(rows, visited, (0.0, 0.0), bound, np.inf, 0.0)
        assert made is not None and all(each.fits(each.bytes_of(made)) for each in problems)
        labels = [sorted({choices[layer] for choices in visited}) for layer in range(LAYERS)]
        assert all(choice in each for choice, each in zip(made, labels, strict=True))
        fitting = (x for x in itertools.product(*labels) if all(each.fits(each.bytes_of(x)) for each in problems))
        best = min(map(problems[0].seconds_of, fitting))
        assert problems[0].seconds_of(made) == pytest.approx(best, rel=1e-12)
        alone = min(problems[0].seconds_of(x) for x in visited if all(each.fits(each.bytes_of(x)) for each in problems))
        gained.append(alone - best)
        assert crossed(rows, visited, (0.0, 0.0), bound, best, 0.0) is None, "known already"
    assert max(gained) > 0, "one of them is always best: the test says nothing"


def test_of_one_solution_or_of_too_many_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows.of(_layers(0, 0.5), NEVER, np.inf)
    assert rows is not None
    monkeypatch.setattr(crossing, "MARGINS", WIDE)
    visited, bound = ((0,) * LAYERS, (2,) * LAYERS), rows.at((0.0, 0.0))[0]
    assert crossed(rows, visited[:1], (0.0, 0.0), bound, np.inf, 0.0) is None
    assert crossed(rows, visited, (0.0, 0.0), bound, np.inf, 0.0) is not None
    monkeypatch.setattr(crossing, "MAX_WORK", 1)
    assert crossed(rows, visited, (0.0, 0.0), bound, np.inf, 0.0) is None


def test_nodes_that_take_the_same_keep_one_array() -> None:
    one, two, other = taken_by([(0, 0, 1), (2, 2, 1)], [3, 3, 3]).kept
    assert one is two and one.tolist() == [True, False, True] and other.tolist() == [False, True, False]
