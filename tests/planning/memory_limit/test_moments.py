"""Moments get a row where choices exceed the limit there, or the mixture at the best prices does on average."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.memory.moments import MemoryRow
from autopar.planning.memory_limit import moments as moments_module
from autopar.planning.memory_limit.answers import row_of
from autopar.planning.memory_limit.moments import Moments
from autopar.solver.deadline import NEVER
from autopar.solver.problem import Problem
from autopar.solver.search import Stated, search
from tests.solver.random_problems import brute_force, layered_rows

LIMIT = 100
TAKEN: dict[tuple[int, ...], np.ndarray] = {(0,): np.array([50, 130, 90, 60]), (1,): np.array([150, 50, 90, 160])}
usages = st.lists(st.integers(0, 3 * LIMIT), min_size=1, max_size=30).map(np.array)


def _stated(rows: Sequence[MemoryRow]) -> list[Problem]:
    return [Problem((), (), LIMIT) for _ in rows]


def _moments(limit: int = LIMIT) -> Moments:
    return Moments(_stated, TAKEN.__getitem__, limit, [0])


@given(usages)
def test_choices_fit_where_they_keep_the_limit_at_every_moment_and_else_their_fullest_has_a_row(
    taken: np.ndarray,
) -> None:
    looked: list[tuple[int, ...]] = []
    moments = Moments(_stated, lambda choices: looked.append(choices) or taken, LIMIT, [0])
    for _ in range(2):
        assert moments.fits((0,)) is bool((taken <= LIMIT).all())
    assert looked == [(0,)]
    assert taken.max() <= LIMIT or int(taken.argmax()) in moments.numbers
    assert len(set(moments.numbers)) == len(moments.numbers) == len(moments.problems())
    assert moments.numbers[0] == 0 and all(taken[each] > LIMIT for each in moments.numbers[1:])


def test_a_search_begins_at_the_moment_that_the_first_choices_exceed() -> None:
    over_elsewhere, over_here = _moments(), _moments()
    over_elsewhere.begin_with((0,))
    over_here.begin_with((1,))
    assert (over_elsewhere.numbers, over_here.numbers) == ([1], [0])


def test_a_search_that_begins_at_choices_has_a_row_where_each_stretch_begins_at_which_they_fill_the_limit() -> None:
    taken = np.array([100, 90, 100, 100, 20, 100])
    moments = Moments(_stated, lambda _: taken, LIMIT, [4])
    moments.fill_with((0,))
    assert moments.numbers == [4, 0, 2, 5]


def test_moments_are_added_that_choices_are_over_the_limit_at_on_average() -> None:
    moments = _moments()
    assert moments.exceeds((((0,), 0.5), ((1,), 0.5)))  # 100, 90, 90, 110
    assert moments.numbers == [0, 3]


def test_nothing_is_added_where_no_average_is_over_the_limit() -> None:
    moments = _moments(limit=110)
    assert not moments.exceeds((((0,), 0.5), ((1,), 0.5)))
    assert not moments.exceeds(())
    assert moments.numbers == [0]


def test_nothing_is_added_where_a_row_is_not_kept() -> None:
    moments = _moments()
    assert not moments.exceeds((((1,), 1.0),))  # over the limit at 0, which has a row
    assert moments.numbers == [0]


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_mixed_adds_moments_a_few_times_only(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_module, "MAX_MIXED", times)
    taken: dict[tuple[int, ...], np.ndarray] = {(0,): np.array([50, 130, 90, 60]), (1,): np.array([50, 90, 130, 60])}
    moments = Moments(_stated, taken.__getitem__, LIMIT, [0])
    assert moments.exceeds((((0,), 1.0),))
    assert moments.exceeds((((1,), 1.0),)) == (times > 1)
    assert moments.numbers == [0, 1, 2][: 1 + times]


def test_a_row_is_stated_for_each_moment_once_more_are_needed() -> None:
    requested: list[Sequence[MemoryRow]] = []
    moments = Moments(lambda rows: requested.append(rows) or _stated(rows), TAKEN.__getitem__, LIMIT, [0])
    moments.problems()
    assert not moments.fits((0,)) and moments.fits((0,)) is False
    assert len(moments.problems()) == len(moments.problems()) == 2
    assert requested == [[MemoryRow(((0, 1),))], [MemoryRow(((0, 1),)), MemoryRow(((1, 1),))]]


def test_beyond_so_many_rows_no_moment_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_module, "MAX_ROWS", 1)
    moments = _moments()
    assert not moments.fits((0,)) and not moments.exceeds((((0,), 1.0),)) and moments.numbers == [0]


def test_moments_of_a_sum_weigh_as_much_as_their_prices() -> None:
    assert row_of({3: 1.0, 1: 3.0, 2: 0.0}) == MemoryRow(((1, 750), (3, 250)))
    assert row_of({1: 0.0}) == MemoryRow(())


@pytest.mark.parametrize("seed", range(4))
def test_a_search_with_rows_for_some_moments_ends_as_with_one_for_each(seed: int) -> None:
    every = layered_rows(seed, 3, 5)
    limit = max(each.budget or 0 for each in every)
    every = [Problem(each.nodes, each.edges, limit) for each in every]

    def state(rows: Sequence[MemoryRow]) -> list[Problem]:
        return [every[row.weights[0][0]] for row in rows]

    moments = Moments(state, lambda choices: np.array([each.bytes_of(choices) for each in every]), limit, [0])
    one, other = search(moments, NEVER), search(Stated(tuple(every)), NEVER)
    best = brute_force(every)
    assert one.seconds == pytest.approx(best) == pytest.approx(other.seconds)
    assert one.bound == pytest.approx(best)
