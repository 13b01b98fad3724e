"""Moments get a row where what the best prices mix is over the limit on average."""

from __future__ import annotations

import numpy as np

from autopar.costs.memory.moments import MemoryRow
from autopar.planning.memory_limit.answers import Places, row_of

TAKEN: dict[tuple[int, ...], np.ndarray] = {(0,): np.array([50, 130, 90, 60]), (1,): np.array([150, 50, 90, 160])}


def _places(limit: int = 100) -> Places:
    return Places({0}, limit, TAKEN.__getitem__)


def test_moments_are_added_that_choices_are_over_the_limit_at_on_average() -> None:
    places = _places()
    assert places.add_mixed((((0,), 0.5), ((1,), 0.5)))  # 100, 90, 90, 110
    assert places.rows() == ([0, 3], (MemoryRow(((0, 1),)), MemoryRow(((3, 1),))))


def test_nothing_is_added_where_no_average_is_over_the_limit() -> None:
    places = _places(limit=110)
    assert not places.add_mixed((((0,), 0.5), ((1,), 0.5)))
    assert not places.add_mixed(())
    assert places.numbers == {0}


def test_nothing_is_added_where_a_row_is_not_kept() -> None:
    places = _places()
    assert not places.add_mixed((((1,), 1.0),))  # over the limit at 0, which has a row
    assert places.numbers == {0}


def test_moments_of_a_sum_weigh_as_much_as_their_prices() -> None:
    assert row_of({3: 1.0, 1: 3.0, 2: 0.0}) == MemoryRow(((1, 750), (3, 250)))
    assert row_of({1: 0.0}) == MemoryRow(())


def test_what_is_mixed_adds_moments_a_few_times_only() -> None:
    taken: dict[tuple[int, ...], np.ndarray] = {(0,): np.array([50, 130, 90, 60]), (1,): np.array([50, 90, 130, 60])}
    for times, numbers in ((1, {0, 1}), (2, {0, 1, 2})):
        places = Places({0}, 100, taken.__getitem__, times_left=times)
        assert places.add_mixed((((0,), 1.0),))
        assert places.add_mixed((((1,), 1.0),)) == (times > 1)
        assert places.numbers == numbers
