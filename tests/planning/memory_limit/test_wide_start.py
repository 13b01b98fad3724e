"""At high treewidth choices near the best without a limit are start enough, unless they are the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.costs.space.space import Space
from autopar.errors import CutOffError
from autopar.planning.memory_limit import memory_limit
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import Statements, make_plan
from autopar.planning.settings import Settings, context_of
from autopar.solver import solve as solving
from autopar.solver.prepared import Prepared
from autopar.solver.problem import Solution
from tests.support.planned import space_of

OPEN = 1e-3
"""Relative gap that the search leaves open."""


@pytest.fixture(scope="module")
def space() -> Space:
    return space_of(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), (torch.zeros(32, 32),), dp=4)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the gaps of solved problems without a limit; a search that may leaves something open."""
    found: list[float] = []

    def solved(prepared: Prepared, *, gap: float = 0.0, **options: Any) -> Solution:
        solution = solving.solve_prepared(prepared, gap=gap, **options)
        if prepared.problem.budget is None:
            found.append(gap)
            return replace(solution, bound=(1 - OPEN) * solution.bound) if gap > OPEN else solution
        return solution

    monkeypatch.setattr(solving, "EXPENSIVE_WORK", 0)
    monkeypatch.setattr(memory_limit, "FEW_CALLS", 0)
    monkeypatch.setattr(memory_limit, "solve_prepared", solved)
    return found


def test_what_is_over_the_limit_is_not_looked_for_further(space: Space, requested: list[float]) -> None:
    free = make_plan(space, {})[0]
    assert requested == [0.0] and free.gap == 0
    found = make_plan(space, {}, Settings(Memory(int(0.8 * free.peak_bytes))))[0]
    assert requested[1:] and set(requested[1:]) == {memory_limit.START_GAP}
    assert found.peak_bytes <= 0.8 * free.peak_bytes and found.bound <= found.seconds


def test_what_fits_is_the_best(space: Space, requested: list[float]) -> None:
    free = make_plan(space, {})[0]
    found = make_plan(space, {}, Settings(Memory(2 * free.peak_bytes)))[0]
    assert requested[1:] == [memory_limit.START_GAP, 0.0]
    assert found.seconds == free.seconds and found.gap == 0


def test_where_the_best_is_requested_nothing_is_left_open(space: Space, requested: list[float]) -> None:
    free = make_plan(space, {})[0]
    make_plan(space, {}, Settings(Memory(int(0.8 * free.peak_bytes)), Search(gap=0.0)))
    assert set(requested) == {0.0}


@pytest.mark.slow
def test_where_problems_are_stated_once_they_are_requested_once_without_the_limit(
    space: Space, requested: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = make_plan(space, {})[0]
    limit, stated = int(0.8 * free.peak_bytes), Statements(space)
    with pytest.raises(CutOffError):
        make_plan(space, {}, Settings(Memory(limit), cutoff=0.0), stated=stated)
    count = len(requested)
    monkeypatch.setattr(memory_limit, "solve_narrow", None)  # nor is it tried whether the graph is narrow
    again, choices = make_plan(space, {}, Settings(Memory(limit)), stated=stated)
    assert len(requested) == count
    monkeypatch.undo()
    monkeypatch.setattr(solving, "EXPENSIVE_WORK", 0)
    alone, same = make_plan(space, {}, Settings(Memory(limit)))
    assert (again.seconds, again.bound, choices) == (alone.seconds, alone.bound, same)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*not proven best")
@pytest.mark.parametrize("share", [0.8, 2.0])
def test_what_the_time_ended_is_not_kept(
    share: float, space: Space, requested: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, stated, solve = int(share * make_plan(space, {})[0].peak_bytes), Statements(space), solving.solve_prepared

    def broken_off(prepared: Prepared, **options: Any) -> Solution:
        solution = solve(prepared, **options)
        return replace(solution, bound=(1 - 2 * memory_limit.START_GAP) * solution.bound)

    with monkeypatch.context() as short:
        short.setattr(memory_limit, "solve_prepared", broken_off)
        make_plan(space, {}, Settings(Memory(limit)), stated=stated)
    del requested[:]
    assert make_plan(space, {}, Settings(Memory(limit)), stated=stated)[0].gap == 0 and requested
    del requested[:]
    assert make_plan(space, {}, Settings(Memory(limit)), stated=stated)[0].gap == 0 and not requested


def test_what_is_kept_is_of_the_same_pins_and_limit(space: Space, requested: list[float]) -> None:
    stated, free = Statements(space), make_plan(space, {})[0]
    limit, pins = int(0.8 * free.peak_bytes), {0: np.arange(len(space.decisions[0].candidates.strategies)) > 0}
    for some, room in (({}, limit), (pins, limit), ({}, limit - 1)):
        count = len(requested)
        with pytest.raises(CutOffError):
            make_plan(space, some, Settings(Memory(room), cutoff=0.0), stated=stated)
        assert len(requested) > count


@pytest.mark.slow
def test_a_search_begins_at_the_prices_of_another_plan_of_the_model(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solving, "EXPENSIVE_WORK", 0)
    stated, begun, search = Statements(space), [], memory_limit.solve_rows
    limit = int(0.8 * make_plan(space, {}, stated=stated)[0].peak_bytes)
    best = make_plan(space, {}, Settings(Memory(limit)), stated=stated)[0]
    row = context_of(best).row
    assert best.multiplier and row is not None

    def noted(problems: Any, prices: list[float], *args: Any, **options: Any) -> Any:
        begun.append([price for price in prices if price])
        return search(problems, prices, *args, **options)

    monkeypatch.setattr(memory_limit, "solve_rows", noted)
    make_plan(space, {}, Settings(Memory(limit)), stated=stated)
    stated.begin_at_prices_of(best)
    make_plan(space, {}, Settings(Memory(limit)), stated=stated)
    assert [begun[0], begun[-1]] == [[], [best.multiplier * weight for _, weight in row.weights]]
