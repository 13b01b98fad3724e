"""Smaller choices next to the fastest ones are used if the fastest exceed the limit at other moments."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Link
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.space.space import Space
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.annotations.annotate import annotate, annotations_of
from autopar.planning.annotations.pins import pins_of
from autopar.planning.formulation import Pins
from autopar.planning.memory_limit import memory_limit
from autopar.planning.memory_limit.answers import (
    Answer,
    choices_of_nodes,
    in_each_mode,
    smaller_ones,
    without_idle_modes,
)
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import answer_of, formulations_of, make_plan
from autopar.planning.settings import Settings
from autopar.solver import low_treewidth as narrow
from tests.support.planned import space_of

WIDTH, LAYERS = 32, 4
ROUGHLY = 0.2


@pytest.fixture(scope="module")
def space() -> Space:
    """Equal layers whose weights are best whole and split where memory is short."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    hardware = replace(load("cpu"), links=(Link("wire", None, 0.0, 1e9),))  # bytes alone cost time
    return space_of(nn.Sequential(*layers), (torch.zeros(32, WIDTH),), hardware, dp=4)


@pytest.fixture(scope="module")
def pins(space: Space) -> Pins:
    """Every layer works on its part of the batch, so that weights that are split are gathered."""
    found = annotate(nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(LAYERS))), "*", dp="data")
    return pins_of(annotations_of(found), space, "semi_auto", {})


@pytest.mark.parametrize("seed", range(4))
def test_segments_stay_as_they_are_where_another_mode_gains_nothing(space: Space, seed: int) -> None:
    settings = Settings(Memory(make_plan(space, {})[0].peak_bytes))
    (formulation,) = formulations_of(MemoryModel(space), settings)[-1:]
    modes = settings.modes(formulation.memory.lifetimes.segments)
    assert modes is not None
    rng = np.random.default_rng(seed)
    answer = answer_of([formulation], {}, settings)
    known = formulation.memory.lifetimes.modes
    problem = formulation.problem({}, modes=modes)
    count = len(answer.choices)
    segments = [replace(each, seconds=rng.random(len(each.seconds))) for each in problem.nodes[count:]]
    problem = replace(problem, nodes=(*problem.nodes[:count], *segments))
    answer = replace(answer, modes={name: str(rng.choice(known)) for name in modes}, problem=problem)
    kept = dict(answer.modes)

    def seconds() -> float:
        return problem.seconds_of(choices_of_nodes(answer.choices, kept.values()))

    for name, mode in answer.modes.items():
        before = seconds()
        kept[name] = MODES[0]
        if seconds() > before:
            kept[name] = mode
    found = without_idle_modes(answer, formulation, {}, modes, 2**62)
    assert found.modes == kept
    peak, *_ = memory_use(formulation.memory, answer.choices, kept)
    assert found.peak_bytes == peak or kept == answer.modes
    assert without_idle_modes(answer, formulation, {}, modes, 0).modes == answer.modes


@pytest.mark.slow
def test_where_more_is_expensive_what_is_near_enough_is_taken(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    free = make_plan(space, {})[0].peak_bytes
    limits = [int(share * free) for share in (0.9, 0.8, 0.7, 0.6)]
    best = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    monkeypatch.setattr(narrow, "CHEAP_WORK", 0)
    monkeypatch.setattr(memory_limit, "STOP_GAP", ROUGHLY)
    monkeypatch.setattr(memory_limit, "FEW_CALLS", 0)
    found = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    for limit, one, other in zip(limits, found, best, strict=True):
        assert one.peak_bytes <= limit and other.gap <= 1e-9
        assert one.bound <= other.seconds * (1 + 1e-9) <= one.seconds * (1 + 2e-9)
        assert one.gap <= ROUGHLY
    assert any(each.gap > 0 for each in found), "nothing was left open: the test says nothing"
    monkeypatch.undo()
    monkeypatch.setattr(narrow, "CHEAP_WORK", 0)  # of so few calls all may be proven, however expensive
    few = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    assert [each.seconds for each in few] == [each.seconds for each in best] and not any(each.gap for each in few)
    monkeypatch.undo()
    exact = [make_plan(space, {}, Settings(Memory(limit), Search(gap=0.0)))[0] for limit in limits]
    assert [each.seconds for each in exact] == [each.seconds for each in best]


def _answer(space: Space, pins: Pins, share: float) -> tuple[Answer, MemoryModel]:
    """The best within a share of what the best without a limit takes, without weights that are fetched ahead."""
    limit = int(share * make_plan(space, pins, Settings(Memory(prefetch=0)))[0].peak_bytes)
    settings = Settings(Memory(limit, prefetch=0))
    formulations = formulations_of(MemoryModel(space), settings)
    return answer_of(formulations, pins, settings), formulations[0].memory


def _with_smaller(space: Space, pins: Pins) -> tuple[Answer, MemoryModel]:
    """An answer with another one, of less memory, as a smaller one of its own."""
    fast, memory = _answer(space, pins, 0.9)
    small, _ = _answer(space, pins, 0.8)
    assert small.peak_bytes < fast.peak_bytes and small.modes.keys() == fast.modes.keys()
    modes = [MODES.index(each) for each in small.modes.values()]
    return replace(fast, smaller=((*small.choices, *modes),)), memory


def test_smaller_ones_say_what_they_take(space: Space, pins: Pins) -> None:
    answer, memory = _with_smaller(space, pins)
    one, other = smaller_ones(answer, memory)
    assert one == answer
    assert other.seconds > one.seconds and other.bound == answer.bound and not other.smaller[1:]
    assert (other.peak_bytes, other.memory) == memory_use(memory, other.choices, other.modes)[:2]


def test_choices_are_had_with_every_segment_in_each_mode_that_it_may_have(space: Space, pins: Pins) -> None:
    answer = replace(_answer(space, pins, 0.9)[0], modes={"first": "none", "second": "selective"})
    found = in_each_mode(answer, {"first": "", "second": "none|selective"}, ("none", "selective", "full"))
    assert [each[: len(answer.choices)] for each in found] == [answer.choices] * 4
    assert [each[len(answer.choices) :] for each in found] == [(0, 1), (0, 0), (1, 1), (MODES.index("full"), 1)]


def test_an_answer_that_is_computed_again_may_have_the_bound_of_a_plan_without_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that an answer with recomputation may have the bound of a plan without segments.

    This happens if time runs out before the prices of moments prove more than a plan without a limit does.
    """
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    space = space_of(nn.Sequential(*layers), (torch.zeros(512, WIDTH),), load("cpu"), dp=2)
    free = make_plan(space, {}, Settings(Memory(prefetch=0)))[0]
    limit = int(0.8 * free.peak_bytes)
    best = make_plan(space, {}, Settings(Memory(limit, prefetch=0)))[0]
    solve_rows = memory_limit.solve_rows
    monkeypatch.setattr(memory_limit._Search, "where_the_backward_begins", lambda *args: None)
    monkeypatch.setattr(memory_limit._Search, "by_sums", lambda *args: None)
    monkeypatch.setattr(memory_limit, "solve_rows", lambda *a, **k: replace(solve_rows(*a, **k), bound=-math.inf))
    with pytest.warns(RuntimeWarning, match="not proven best"):
        found = make_plan(space, {}, Settings(Memory(limit, prefetch=0)))[0]
    assert set(found.recompute.values()) - {MODES[0]}, "nothing is computed again: the test says nothing"
    assert found.bound == free.seconds < found.seconds == best.seconds
    assert found.verify().ok


def test_a_bound_that_counts_prove_where_no_moment_has_a_price_is_kept(space: Space) -> None:
    settings = Settings(Memory(make_plan(space, {})[0].peak_bytes))
    formulation = formulations_of(MemoryModel(space), settings)[0]
    answer = replace(answer_of([formulation], {}, settings), bound=0.0)
    search = memory_limit._Search(formulation, {}, math.inf, 0.0, "auto", 0.0, 0.0, False, 0.0, 0.0)
    found = search._proven(answer, {0: 0.0}, answer.seconds)
    assert (found.bound, found.multiplier, found.problem) == (answer.seconds, answer.multiplier, answer.problem)
    assert search._proven(found, {0: 0.0}, 0.0) is found
