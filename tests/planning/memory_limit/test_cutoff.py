"""A search within a limit ends where it proves that no plan is faster than one that is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Link
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow, PricedMemory
from autopar.costs.space.space import Space
from autopar.errors import CutOffError
from autopar.planning.formulation import Formulation
from autopar.planning.options.groups import Memory
from autopar.planning.planner import Statements, best_plan_of, make_plan, seconds_of_microbatch
from autopar.planning.settings import Settings, context_of
from autopar.solver import search as searching
from autopar.solver.oracles import EliminationOracle
from tests.support.planned import space_of

WIDTH, LAYERS = 32, 4
SHARES = (0.9, 0.8, 0.7, 0.6)


@pytest.fixture(scope="module")
def space() -> Space:
    """Equal layers whose weights are best whole and split where memory is short."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    hardware = replace(load("cpu"), links=(Link("wire", None, 0.0, 1e9),))  # bytes alone cost time
    return space_of(nn.Sequential(*layers), (torch.zeros(32, WIDTH),), hardware, dp=4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", SHARES)
def test_it_ends_at_the_best_plan_and_not_just_above_it(space: Space, share: float) -> None:
    limit = int(share * make_plan(space, {})[0].peak_bytes)
    best, choices = make_plan(space, {}, Settings(Memory(limit)))
    with pytest.raises(CutOffError) as caught:
        make_plan(space, {}, Settings(Memory(limit), cutoff=best.bound))
    assert best.bound >= caught.value.seconds >= best.bound * (1 - 1e-9)
    above, same = make_plan(space, {}, Settings(Memory(limit), cutoff=math.nextafter(best.seconds, math.inf)))
    assert (above.seconds, same) == (best.seconds, choices)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """The prices at which the whole is evaluated."""
    found, at = [], EliminationOracle.at
    monkeypatch.setattr(
        EliminationOracle, "at", lambda self, *given, **more: found.append(given[0]) or at(self, *given, **more)
    )
    return found


@pytest.mark.parametrize(("share", "num_prices"), [(0.0, 1), (1.0, 1), (1.001, 3)])
def test_no_price_is_looked_for_beyond_a_bound_that_is_enough(
    space: Space, evaluated: list[tuple[float, ...]], share: float, num_prices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = make_plan(space, {})[0]
    evaluated.clear()
    monkeypatch.setattr(searching, "BestBelow", None)  # whoever goes on fails
    with pytest.raises(CutOffError) as caught:
        make_plan(space, {}, Settings(Memory(int(0.7 * free.peak_bytes)), cutoff=share * free.seconds))
    assert caught.value.seconds >= free.seconds * (1 - 1e-9) and len(set(evaluated)) == num_prices


def test_the_answer_without_a_limit_decides_without_rows_where_it_can(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, problems, rows = make_plan(space, {})[0], Formulation.problems, list[Any]()

    def noted(formulation: Formulation, pins: Any, stated: Any, *more: Any) -> Any:
        rows.extend(stated)
        return problems(formulation, pins, stated, *more)

    monkeypatch.setattr(Formulation, "problems", noted)
    with pytest.raises(CutOffError):
        make_plan(space, {}, Settings(Memory(int(0.7 * free.peak_bytes)), cutoff=0.0))
    assert make_plan(space, {}, Settings(Memory(free.peak_bytes)))[0].seconds == free.seconds
    assert set(rows) == {None}


def test_its_choices_are_not_evaluated_once_more(space: Space, evaluated: list[tuple[float, ...]]) -> None:
    limit = int(0.7 * make_plan(space, {})[0].peak_bytes)
    evaluated.clear()
    make_plan(space, {}, Settings(Memory(limit)))
    assert evaluated[0] == (0.0,) and len(evaluated) > 2 and all(map(any, evaluated[1:]))


def test_what_pays_nothing_for_memory_is_an_answer_whatever_the_cutoff(space: Space) -> None:
    free = make_plan(space, {})[0]
    assert make_plan(space, {}, Settings(Memory(free.peak_bytes), cutoff=0.0))[0].seconds == free.seconds


def test_where_nothing_fits_nothing_is_as_fast(space: Space) -> None:
    with pytest.raises(CutOffError) as caught:
        make_plan(space, {}, Settings(Memory(100), cutoff=1e9))
    assert caught.value.seconds == math.inf


def test_of_two_ways_to_run_micro_batches_the_better_decides(space: Space) -> None:
    ways = [Microbatches(4, reduce_each=each) for each in (False, True)]
    limit = int(0.9 * make_plan(space, {}, microbatches=ways[0])[0].peak_bytes)
    one, other = (make_plan(space, {}, Settings(Memory(limit)), microbatches=each)[0] for each in ways)
    settings = Settings(Memory(limit))
    best = best_plan_of(ways, Statements(space), {}, settings)
    least = min(map(seconds_of_microbatch, (one, other)))
    assert seconds_of_microbatch(best) == least
    assert context_of(best).settings == settings
    with pytest.raises(CutOffError):
        best_plan_of(ways, Statements(space), {}, replace(settings, cutoff=least * (1 - 1e-6)))
    above = best_plan_of(ways, Statements(space), {}, replace(settings, cutoff=least * (1 + 1e-6)))
    assert above.strategies == best.strategies


def test_at_prices_of_a_plan_of_the_same_model_one_evaluation_says_that_none_is_faster(
    space: Space, evaluated: list[tuple[float, ...]]
) -> None:
    """They are those of a plan of the model captured otherwise: its calls have the same names."""
    free = make_plan(space, {})[0]
    limit = int(0.9 * free.peak_bytes)
    best = make_plan(space, {}, Settings(Memory(limit)))[0]
    row, stated = context_of(best).row, Statements(space)
    assert row is not None and best.multiplier
    stated.of(Settings(Memory(limit)))
    stated.begin_at_prices_of(best)
    evaluated.clear()
    with pytest.raises(CutOffError) as caught:
        make_plan(space, {}, Settings(Memory(limit), cutoff=0.8 * free.seconds + 0.2 * best.bound), stated=stated)
    ((*prices,),) = set(evaluated)
    assert sorted(filter(None, prices)) == pytest.approx(sorted(best.multiplier * weight for _, weight in row.weights))
    assert caught.value.seconds <= best.bound * (1 + 1e-9)
    above = Settings(Memory(limit), cutoff=math.nextafter(best.seconds, math.inf))
    assert make_plan(space, {}, above, stated=stated)[0].seconds == best.seconds


def test_moments_are_those_of_calls_of_the_same_names_and_else_where_the_backward_begins(space: Space) -> None:
    longer = space_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), (torch.zeros(32, WIDTH),), dp=4)
    own, other = MemoryModel(space).presence, MemoryModel(longer).presence
    names = [each.lifetimes.names for each in (own, other)]
    assert set(names[0]) - set(names[1]) and set(names[0]) & set(names[1])
    for place, name in enumerate(names[0]):
        for kind in (0, 2):
            row = MemoryRow(((kind * len(names[0]) + place, 3),))
            same = len(names[1]) - 1
            if name in names[1]:
                same = kind * len(names[1]) + names[1].index(name)
            assert PricedMemory(row, 2.0).of_the_same_calls(own, other) == PricedMemory(MemoryRow(((same, 3),)), 2.0)
    several = MemoryModel(longer, Microbatches(4, reduce_each=True)).presence
    assert PricedMemory(MemoryRow(((0, 1),)), 2.0).of_the_same_calls(own, several) is None
