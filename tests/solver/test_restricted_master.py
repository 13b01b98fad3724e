"""Choices made of pieces of others are the best of all that have every piece in a way that is known, and fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.solver.elimination import order
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining.restricted_master import RestrictedMaster

LAYERS, WAYS = 6, 3
EFFORT = 5.0


@pytest.fixture(autouse=True)
def layers_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MIN_PART", 2)


def _layers(seed: int, share: float, num_rows: int = LAYERS) -> list[Problem]:
    """Equal layers, each of a call and of what it hands on, with a row for the moment of each of the later layers.

    At a layer's moment there is what the layers up to it keep, and what it works on itself.
    """
    random = np.random.default_rng(seed)
    seconds = np.array([1.0, 1.3, 2.0])
    kept, works_on = np.array([9, 5, 1]), np.array([9, 20, 2])
    inside = np.where(np.eye(WAYS, dtype=bool), 0.0, random.uniform(0.3, 0.9, (WAYS, WAYS)))
    change = np.where(np.eye(WAYS, dtype=bool), 0.0, random.uniform(0.3, 0.9, (WAYS, WAYS)))
    nothing = np.zeros(WAYS, dtype=np.int64)
    edges = [Edge((2 * layer, 2 * layer + 1), inside) for layer in range(LAYERS)]
    edges += [Edge((2 * layer + 1, 2 * layer + 2), change) for layer in range(LAYERS - 1)]
    rows = []
    for moment in range(LAYERS - num_rows, LAYERS):
        row_bytes = [kept * (layer <= moment) + works_on * (layer == moment) for layer in range(LAYERS)]
        nodes = [(Node("call", seconds, each), Node("out", np.zeros(WAYS), nothing)) for each in row_bytes]
        most = int(sum(each.max() for each in row_bytes))
        rows.append(Problem(tuple(itertools.chain(*nodes)), tuple(edges), int(share * most)))
    return rows


def _fits(problems: list[Problem], choices: tuple[int, ...]) -> bool:
    return all(each.fits(each.bytes_of(choices)) for each in problems)


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.4, 0.8])
def test_what_is_made_is_the_best_of_what_pieces_are_known(share: float) -> None:
    gained = []
    for seed in range(2):
        problems = _layers(seed, share)
        incumbent = [(0,) * 2 * LAYERS, (2,) * 2 * LAYERS]
        columns = RestrictedMaster(problems[0], incumbent)
        columns.add(problems[:3])
        columns.add(problems[3:])
        made = columns.best(EFFORT, 0.0)
        assert made is not None and _fits(problems, made)
        every = (x for x in itertools.product((0, 2), repeat=2 * LAYERS) if _fits(problems, x))
        best = min(map(problems[0].seconds_of, every))
        assert problems[0].seconds_of(made) == pytest.approx(best, rel=1e-9)
        gained.append(min(problems[0].seconds_of(x) for x in incumbent if _fits(problems, x)) - best)
        assert columns.best(EFFORT, 0.0, incumbent[1]) is not None
    assert max(gained) > 0.1, "nothing was to be gained: the test says nothing"


def test_a_way_that_one_layer_is_known_to_have_is_tried_in_equal_ones() -> None:
    first = _layers(0, 1.0)[-1:]
    incumbent = [(0,) * 2 * LAYERS, (0,) * LAYERS + (2, 2) + (0,) * (LAYERS - 2)]
    least = min(first[0].bytes_of(each) for each in incumbent)
    tight = Problem(first[0].nodes, first[0].edges, least - 1)
    columns = RestrictedMaster(tight, incumbent)
    columns.add([tight])
    made = columns.best(EFFORT, 0.0)
    assert made is not None and _fits([tight], made)
    changed = {number // 2 for number, choice in enumerate(made) if choice}
    assert changed - {LAYERS // 2}, "what fits has to change another layer"


def test_nothing_is_made_where_what_all_take_is_over_a_budget() -> None:
    problems = _layers(0, 0.8)
    incumbent = [
        (0,) * 2 * LAYERS,
        (0,) * (2 * LAYERS - 2) + (2, 2),
    ]  # the last layer holds nothing at the first moment
    columns = RestrictedMaster(problems[0], incumbent)
    columns.add([Problem(problems[0].nodes, problems[0].edges, problems[0].bytes_of(incumbent[0]) - 1)])
    assert columns.best(EFFORT, 0.0) is None
