"""Folded labels leave out nothing that is in a better solution, and counted solutions are returned whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining import folded_labels as labels
from autopar.solver.remaining import remaining_choices as remaining_module
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.folded_labels import folded_labels_of, occurrences
from autopar.solver.remaining.remaining_choices import RemainingProblem, TooManyChoicesError
from tests.solver.random_problems import SHAPES, random_rows, reference

CLOSE = 1e-7  # of the seconds: the reference counts in rounded units
PRICE = 0.01


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31 - 1),
    shape=st.sampled_from(SHAPES),
    num_rows=st.integers(1, 3),
    folded=st.sampled_from([0.0, 1.0, 2.0, math.inf]),
    is_sharpened=st.booleans(),
    rounds=st.sampled_from([0, 1, 500]),
    room=st.sampled_from([0.9, 1.0001, 1.2, 3.0]),
)
def test_the_best_of_the_ways_is_the_best_of_all(
    seed: int, shape: str, num_rows: int, folded: float, is_sharpened: bool, rounds: int, room: float
) -> None:
    problems = random_rows(seed, shape, num_rows)
    best = reference(problems)
    limit = room * best if best < math.inf else 10.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "FOLDED", folded)
        patch.setattr(labels, "ROUNDS", rounds)
        left = RemainingProblem(problems, [PRICE] * num_rows, limit, math.inf)
        found = best_counts(left.sharpened() if is_sharpened else left, 1e-9)
    assert found.is_proven and found.bound == pytest.approx(min(best, limit), rel=CLOSE)
    if found.choices is not None:
        assert all(each.fits(each.bytes_of(found.choices)) for each in problems)
        assert problems[0].seconds_of(found.choices) >= best * (1 - CLOSE)
    if best <= limit:
        assert found.choices is not None
        assert problems[0].seconds_of(found.choices) == pytest.approx(best, rel=CLOSE)


def _chain(num_nodes: int) -> Problem:
    """Equal nodes one after the other: strategies that are slow and small, fast and large, and worse than both."""
    candidates, row_bytes = np.array([2.0, 1.0, 2.5]), np.array([1, 3, 4])
    table = np.array([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.5]])
    nodes = tuple(Node(str(number), candidates, row_bytes) for number in range(num_nodes))
    return Problem(nodes, tuple(Edge((i, i + 1), table) for i in range(num_nodes - 1)), 2 * num_nodes)


def test_all_of_a_chain_is_folded_in_as_long_as_there_are_few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    left = RemainingProblem((_chain(4),), (0.5,), 100.0, math.inf)
    monkeypatch.setattr(labels, "FOLDED", math.inf)
    whole = folded_labels_of(left)
    counts = occurrences(left, whole)
    root = counts.index(1)
    assert sum(counts) == 1 and not whole[root].apart
    # Pareto: 0 to 4 nodes are large, and adjacent ones, so that one pair differs.
    assert sorted(zip(whole[root].seconds.tolist(), whole[root].num_bytes[:, 0].tolist(), strict=True)) == [
        (4.0, 12),
        (5.5, 10),
        (6.5, 8),
        (7.5, 6),
        (8.0, 4),
    ]
    monkeypatch.setattr(labels, "FOLDED", 0.0)
    apart = folded_labels_of(left)
    assert sum(occurrences(left, apart)) == 4 and not any(each.below for each in apart)


def test_equal_parts_are_counted_together_though_nothing_is_folded_in(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = random_rows(1, "parts", 1)
    left = RemainingProblem(problems, (0.0,), 100.0, math.inf)
    monkeypatch.setattr(labels, "FOLDED", 0.0)
    assert sorted(count for count in occurrences(left, folded_labels_of(left)) if count) == [4, 4]
    found = best_counts(left, 1e-9)
    assert found.choices is not None
    assert problems[0].seconds_of(found.choices) == pytest.approx(reference(problems), rel=CLOSE)


def test_too_many_choices_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    left = RemainingProblem((_chain(4),), (0.5,), 100.0, math.inf)
    monkeypatch.setattr(labels, "MAX_CHOICES", left.num_choices)
    assert folded_labels_of(left)
    monkeypatch.setattr(labels, "MAX_CHOICES", left.num_choices - 1)
    with pytest.raises(TooManyChoicesError):
        folded_labels_of(left)


def test_other_prices_leave_less_and_only_where_there_is_much_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = random_rows(4, "skips", 2)
    left = RemainingProblem(problems, (PRICE, PRICE), 1.05 * reference(problems), math.inf)
    sharpened = left.sharpened()
    assert 0 < sharpened.num_choices < left.num_choices
    for (few, _), (many, _) in zip(sharpened.choices, left.choices, strict=True):
        assert {tuple(each) for each in few.tolist()} <= {tuple(each) for each in many.tolist()}
    monkeypatch.setattr(remaining_module.RemainingProblem, "sharpened", None)
    assert best_counts(left, 1e-9).is_proven
    monkeypatch.setattr(remaining_module, "FEW", 0)
    assert best_counts(left, 1e-9, effort=100.0).is_proven, "it is not counted to the end, whatever that takes"
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        best_counts(left, 1e-9)
