"""Within a limit the plan is the best of those that have room to fetch weights a layer ahead, where there are any."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Space
from autopar.errors import CutOffError, InfeasibleError, TimeLimitError
from autopar.planning import planner
from autopar.planning.formulation import Formulation
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.memory_limit.least_peak import least_peak
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import fetched_ahead, formulations_of, make_plan, solved_by
from autopar.planning.settings import Settings
from autopar.solver.deadline import lasting
from tests.planning.memory_limit.test_answers import pins
from tests.planning.memory_limit.test_answers import space as on_the_host

__all__ = ["on_the_host", "pins"]


@pytest.fixture(scope="module")
def space(on_the_host: Space) -> Space:
    """Return the same layers on a device where collectives overlap with compute."""
    return replace(on_the_host, hardware=replace(on_the_host.hardware, communication_share=0.5))


@pytest.fixture(scope="module")
def least(space: Space, pins: Pins) -> tuple[int, int]:
    """The least that a plan takes at its fullest moment, without and with weights that are fetched a layer ahead."""
    model = MemoryModel(space)
    modes = Settings().modes(model.lifetimes.segments)
    one, other = (
        least_peak(Formulation(space, model.fetching_ahead(depth)), pins, modes).peak_bytes for depth in (0, 1)
    )
    assert one < other
    return one, other


def test_a_plan_is_the_best_of_those_with_room_for_a_layer_ahead(
    space: Space, pins: Pins, least: tuple[int, int]
) -> None:
    free, costs = make_plan(space, pins)[0].peak_bytes, []
    for limit in np.linspace(least[1], free - 1, 3, dtype=int).tolist():
        found, tight, loose = (
            make_plan(space, pins, Settings(Memory(limit, prefetch=each)))[0] for each in ("auto", 1, 0)
        )
        assert (found.seconds, found.bound) == (tight.seconds, tight.bound)
        assert found.prefetch == 1 and found.peak_bytes <= limit and found.gap == 0 and found.verify().ok
        assert loose.seconds <= found.seconds
        costs.append(found.seconds - loose.seconds)
    assert max(costs) > 0, "room costs nothing: the test says nothing"


def test_where_no_plan_has_room_for_a_layer_ahead_it_is_the_best_of_all(
    space: Space, pins: Pins, least: tuple[int, int]
) -> None:
    for limit in (least[0], least[1] - 1):
        found, plain = (make_plan(space, pins, Settings(Memory(limit, prefetch=each)))[0] for each in ("auto", 0))
        assert (found.choices, found.bound) == (plain.choices, plain.bound)
        assert found.prefetch == 0 and found.peak_bytes <= limit and found.verify().ok
    with pytest.raises(InfeasibleError, match=re.escape(f"({least[0]} bytes)")):
        make_plan(space, pins, Settings(Memory(least[0] - 1)))


def test_where_nothing_passes_next_to_computing_no_room_is_requested(
    on_the_host: Space, pins: Pins, least: tuple[int, int]
) -> None:
    for limit in least:
        found, plain = (make_plan(on_the_host, pins, Settings(Memory(limit, prefetch=each)))[0] for each in ("auto", 0))
        assert (found.choices, found.bound) == (plain.choices, plain.bound) and found.peak_bytes <= limit


def test_a_cut_off_ends_the_search_with_room_and_no_room_does_not(
    space: Space, pins: Pins, least: tuple[int, int]
) -> None:
    best = make_plan(space, pins, Settings(Memory(least[1])))[0]
    with pytest.raises(CutOffError):
        make_plan(space, pins, Settings(Memory(least[1]), cutoff=best.seconds))
    assert make_plan(space, pins, Settings(Memory(least[0]), cutoff=10 * best.seconds))[0].prefetch == 0


def test_where_time_is_over_before_there_is_a_plan_with_room_no_other_is_looked_for(
    space: Space, pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[int] = []

    def best(formulation: Formulation, *_: object) -> Answer:
        requested.append(formulation.memory.prefetch)
        raise TimeLimitError

    monkeypatch.setattr(planner, "best_within", best)
    for seconds, depths in ((0.0, [1]), (60.0, [1, 0])):
        requested.clear()
        settings = Settings(Memory(1), Search(time_limit=seconds))
        with pytest.raises(TimeLimitError):
            solved_by(formulations_of(MemoryModel(space), settings), pins, settings)
        assert requested == depths


@pytest.mark.parametrize("is_faster", [True, False])
def test_choices_with_room_for_two_layers_fetch_both_ahead_where_that_is_faster(
    space: Space, pins: Pins, least: tuple[int, int], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(Memory(least[1]))
    made = solved_by(formulations_of(MemoryModel(space), settings), pins, settings)
    answer, one = made.answer, made.formulation.memory
    taken, needed = (memory_use(each, answer.choices, answer.modes)[0] for each in (one, one.fetching_ahead(2)))
    assert one.prefetch == 1 and needed > taken
    monkeypatch.setattr(planner, "_is_faster", lambda *_: is_faster)
    assert fetched_ahead(answer, one, settings.limited(needed)).prefetch == (2 if is_faster else 1)
    assert fetched_ahead(answer, one, settings.limited(needed - 1)) is one


def test_where_the_time_is_over_it_is_not_looked_whether_more_is_faster(
    space: Space, pins: Pins, least: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(Memory(least[1]))
    made = solved_by(formulations_of(MemoryModel(space), settings), pins, settings)
    monkeypatch.setattr(planner, "step_timeline", None)  # whoever looks fails
    with lasting(0.0):
        found = fetched_ahead(made.answer, made.formulation.memory, settings.limited(10 * least[1]))
    assert found is made.formulation.memory
