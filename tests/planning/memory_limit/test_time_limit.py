"""The time limit holds under a memory limit: the best plan found by then, or that none was."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar.capture.export import Traced, trace
from autopar.costs.hardware.load import load
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.space.space import Space
from autopar.errors import TimeLimitError
from autopar.planning import best_plan, planner
from autopar.planning import request as plan_request
from autopar.planning.formulation import Formulation
from autopar.planning.memory_limit import memory_limit
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.memory_limit.memory_limit import best_within
from autopar.planning.memory_limit.moments import Moments
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings
from autopar.solver import deadline
from autopar.solver import search as searching
from autopar.solver.search import Found
from tests.planning.memory_limit.test_cutoff import space as equal_layers
from tests.solver.test_deadline import _clock
from tests.support.expert_models import Decoder, token_batches
from tests.support.planned import X_BD, TwoLinears, space_of

__all__ = ["equal_layers"]

TICK = 0.02  # seconds that pass with every look at the clock
LEAST = 232_000  # bytes: between what no plan of four layers is below and the least that is found


@pytest.fixture(scope="module")
def space() -> Space:
    """Layers with experts on two axes."""
    return _layers(4)


def _layers(count: int) -> Space:
    return space_of(Decoder("sorted", count), token_batches(1, 8, 16)[0], load("cpu"), dp=2, ep=2)


def test_the_best_plan_found_by_then_comes_with_its_bound_and_a_warning(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = make_plan(space, {})[0].peak_bytes // 2
    shown = _clock(monkeypatch, TICK)
    with pytest.warns(RuntimeWarning, match="the time limit passed: the plan is within the limit at every moment"):
        plan, _ = make_plan(space, {}, Settings(Memory(limit), Search(time_limit=100.0)))
    assert plan.peak_bytes <= limit and 0 < plan.gap < 1
    assert 100.0 < shown[0] < 110.0


@pytest.mark.parametrize(
    ("seconds", "specified"),
    [
        (8.0, "the time limit passed before a plan within the memory limit, 232.00 kB per device, was found"),
        pytest.param(
            200.0,
            "before a plan within the memory limit, 232.00 kB per device, was found: the least that was found is",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_where_no_plan_was_found_by_then_the_error_says_so(
    space: Space, monkeypatch: pytest.MonkeyPatch, seconds: float, specified: str
) -> None:
    shown = _clock(monkeypatch, TICK)
    with pytest.raises(TimeLimitError, match=specified):
        make_plan(space, {}, Settings(Memory(LEAST), Search(time_limit=seconds)))
    assert seconds < shown[0] < 1.1 * seconds + deadline.GRACE


@pytest.mark.parametrize(
    ("time_limit", "until"), [(100.0, 100.0 * deadline.ENDING), (10.0, 40.0 + 10.0 * deadline.LEAST)]
)
def test_what_capture_takes_is_on_the_clock(monkeypatch: pytest.MonkeyPatch, time_limit: float, until: float) -> None:
    shown, ends = [0.0], []
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: shown[0]))

    def slowly(*args: Any, **options: Any) -> Traced:
        shown[0] += 40.0
        return trace(*args, **options)

    def within(*args: Any) -> Answer:
        ends.append(deadline.after(1000.0))
        return best_within(*args)

    monkeypatch.setattr(plan_request, "trace", slowly)
    monkeypatch.setattr(planner, "best_within", within)
    autopar.plan(TwoLinears(), autopar.Mesh({"dp": 2}), (X_BD,), search=autopar.Search(time_limit=time_limit))
    assert ends == [until]


def test_no_space_is_laid_out_for_a_search_that_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_plan, "is_over", lambda deadline: True)
    monkeypatch.setattr(best_plan, "is_worth_another_search", None)  # whoever asks fails
    autopar.plan(TwoLinears(), autopar.Mesh({"dp": 2}), (X_BD,))


def test_what_fits_is_taken_where_there_is_no_time_for_better(
    equal_layers: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.7 * make_plan(equal_layers, {})[0].peak_bytes)
    best, _ = make_plan(equal_layers, {}, Settings(Memory(limit)))

    def late(*_: object) -> bool:
        raise TimeLimitError

    monkeypatch.setattr(searching._Search, "widen", late)
    with pytest.warns(RuntimeWarning, match="the plan is within the limit at every moment, but not proven best"):
        plan, _ = make_plan(equal_layers, {}, Settings(Memory(limit)))
    assert plan.peak_bytes <= limit
    assert 0 < plan.bound <= best.seconds <= plan.seconds and plan.gap > memory_limit.STOP_GAP


def test_the_smallest_plan_is_taken_where_there_is_no_time_to_begin_a_search(
    equal_layers: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.7 * make_plan(equal_layers, {})[0].peak_bytes)

    begin = searching._Search.begin

    def late(search: searching._Search, at_prices: Any) -> None:
        if isinstance(search.source, Moments):
            raise TimeLimitError
        begin(search, at_prices)

    monkeypatch.setattr(searching._Search, "begin", late)
    with pytest.warns(RuntimeWarning, match="the plan is within the limit at every moment, but not proven best"):
        plan, _ = make_plan(equal_layers, {}, Settings(Memory(limit)))
    assert plan.peak_bytes <= limit and plan.bound == 0


def test_what_is_found_is_stated_though_time_is_over_by_then(
    equal_layers: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.7 * make_plan(equal_layers, {})[0].peak_bytes)
    shown = _clock(monkeypatch, 0.0)

    def slowly(*args: Any) -> Found:
        found = searching.search(*args)
        shown[0] = 100.0
        return found

    monkeypatch.setattr(memory_limit, "search", slowly)
    with deadline.lasting(50.0):
        plan, _ = make_plan(equal_layers, {}, Settings(Memory(limit), Search(time_limit=50.0)))
    assert shown == [100.0] and plan.peak_bytes <= limit and plan.gap < memory_limit.STOP_GAP


@pytest.mark.slow
def test_it_holds_for_many_layers() -> None:
    space = _layers(24)
    limit = make_plan(space, {})[0].peak_bytes // 3
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        plan, _ = make_plan(space, {}, Settings(Memory(limit), Search(time_limit=20.0)))
    assert plan.peak_bytes <= limit and time.monotonic() - start < 25.0


def test_a_problem_that_is_stated_is_broken_off_as_the_whole_time_ends() -> None:
    space = space_of(TwoLinears(), (X_BD,))
    with deadline.lasting(time.monotonic() - 2.0, 1.0), pytest.raises(TimeLimitError, match="the time limit passed"):
        Formulation(space, MemoryModel(space)).problem({})
    with deadline.lasting(time.monotonic() + 60.0):
        Formulation(space, MemoryModel(space)).problem({})


def test_a_problem_looks_at_the_clock_at_every_decision_and_edge_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(TwoLinears(), (X_BD,))
    formulation, least = Formulation(space, MemoryModel(space)), len(space.decisions) + len(space.edges)
    shown = _clock(monkeypatch, 1.0)
    with deadline.lasting(1e9):
        formulation.problem({})
        assert shown[0] >= 2 * least
        for moment in (0, 1):
            before = shown[0]
            formulation.problem({}, MemoryRow(((moment, 1),)), 1000)
            assert shown[0] - before >= 2 * least
