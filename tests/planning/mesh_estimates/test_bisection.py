"""Sizes that are found with few tries are those that trying all of them finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from autopar.planning.mesh_estimates.bisection import GRAIN, largest_size, least_size


def counting(works: Callable[[int], bool]) -> tuple[Callable[[int], bool], list[int]]:
    tried: list[int] = []

    def counted(size: int) -> bool:
        tried.append(size)
        return works(size)

    return counted, tried


@pytest.mark.parametrize("least", range(1, 40))
def test_the_least_size_is_found_with_few_tries_each_once(least: int) -> None:
    def between(low: int, high: int) -> Sequence[int]:
        return range(low + 1, high)

    works, tried = counting(lambda size: size >= least)
    assert least_size([1, 2, 4, 8, 16, 32, 64], between, works) == least
    assert len(tried) == len(set(tried)) <= 12


def test_without_a_size_that_works_there_is_none() -> None:
    assert least_size([1, 2, 4], lambda low, high: [], lambda size: False) is None
    works, tried = counting(lambda size: False)
    assert largest_size(6, 100, works) is None and tried == [6, 3, 1]


@pytest.mark.parametrize("start", [1, 6, 64])
@pytest.mark.parametrize("largest", [1, 2, 5, 29, 63, 64, 100, 1000])
def test_the_largest_size_is_found_to_its_grain(start: int, largest: int) -> None:
    works, tried = counting(lambda size: size <= largest)
    found = largest_size(start, 512, works)
    assert found is not None and found <= largest and len(tried) == len(set(tried))
    assert found * (1 + 2 / GRAIN) + 1 > min(largest, 257), "no more than the grain is lost, but for the most"
