"""Answers within a limit: modes of segments that gain nothing, gaps that are enough, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Link
from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Space
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.annotations.annotate import annotate, annotations_of
from autopar.planning.annotations.pins import pins_of
from autopar.planning.memory_limit import memory_limit
from autopar.planning.memory_limit.answers import choices_of_nodes, without_idle_modes
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import Statements, formulations_of, make_plan, solved_by
from autopar.planning.settings import Settings
from autopar.solver import search as searching
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
    answer = solved_by([formulation], {}, settings).answer
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
    assert without_idle_modes(answer, formulation, {}, modes, 0).modes == answer.modes


@pytest.mark.slow
def test_where_more_is_expensive_what_is_near_enough_is_taken(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    free = make_plan(space, {})[0].peak_bytes
    limits = [int(share * free) for share in (0.9, 0.8, 0.7, 0.6)]
    best = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    monkeypatch.setattr(searching, "CHEAP_WORK", 0)
    monkeypatch.setattr(memory_limit, "STOP_GAP", ROUGHLY)
    monkeypatch.setattr(memory_limit, "FEW_CALLS", 0)
    found = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    for limit, one, other in zip(limits, found, best, strict=True):
        assert one.peak_bytes <= limit and other.gap <= 1e-9
        assert one.bound <= other.seconds * (1 + 1e-9) <= one.seconds * (1 + 2e-9)
        assert one.gap <= ROUGHLY
    assert any(each.gap > 0 for each in found), "nothing was left open: the test says nothing"
    monkeypatch.undo()
    monkeypatch.setattr(searching, "CHEAP_WORK", 0)  # of so few calls all may be proven, however expensive
    few = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    assert [each.seconds for each in few] == [each.seconds for each in best] and not any(each.gap for each in few)
    monkeypatch.undo()
    exact = [make_plan(space, {}, Settings(Memory(limit), Search(gap=0.0)))[0] for limit in limits]
    assert [each.seconds for each in exact] == [each.seconds for each in best]


def test_without_a_limit_the_best_is_found_once_unless_time_ended_it(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested, solve, stated = [], memory_limit.solve, Statements(space)
    monkeypatch.setattr(memory_limit, "solve", lambda *of, **how: requested.append(of) or solve(*of, **how))
    for time_limit, count in ((0.0, 1), (60.0, 2), (60.0, 2)):
        assert make_plan(space, {}, Settings(search=Search(time_limit=time_limit)), stated=stated)[0].gap == 0
        assert len(requested) == count
