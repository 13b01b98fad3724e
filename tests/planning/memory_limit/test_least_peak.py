"""The least memory of any plan: as brute force finds it, stated by refusals, and enough for a plan."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.costs.hardware.load import load
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import bytes_by_moment
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError
from autopar.planning import formulation
from autopar.planning.formulation import Formulation
from autopar.planning.memory_limit.least_peak import least_peak
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings
from autopar.solver.problem import Edge, Problem
from tests.planning.test_planner import every_choice
from tests.support.families import FAMILIES
from tests.support.moments import at_moment
from tests.support.planned import IDS_BS, X_BD, Attention, TwoLinears, space_of


class Layers(nn.Module):
    """Two numbered layers, which may be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BD = x_BD + layer(x_BD)
        return x_BD.square().sum()


@pytest.mark.slow
def test_it_is_what_brute_force_finds() -> None:
    space = space_of(TwoLinears(), (X_BD,), load("cpu"))
    found = least_peak(Formulation(space, MemoryModel(space)), {}, None)
    assert found.is_proven and found.peak_bytes == min(peak for _, peak in every_choice(space, peaks=True).values())


def test_a_brief_search_ends_where_it_is_known_whether_so_little_is_enough() -> None:
    space = space_of(TwoLinears(), (X_BD,), load("cpu"))
    requested = Formulation(space, MemoryModel(space)), {}, None
    least = least_peak(*requested).peak_bytes
    for sufficient in (least // 2, least, 2 * least):
        found = least_peak(*requested, sufficient=sufficient, is_brief=True)
        assert found.bound <= least <= found.peak_bytes
        assert (
            found.bound > sufficient
            if sufficient < least // 2 + 1
            else found.peak_bytes <= max(sufficient, found.peak_bytes)
        )


def test_choices_are_fixed_anew_where_further_rows_state_more_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SPACES["attention"]()
    memory = MemoryModel(space, Microbatches(6, 3))
    monkeypatch.setattr("autopar.planning.memory_limit.least_peak.MAX_PLANES", 2)  # fixing does the rest
    expected, stated, changed = least_peak(Formulation(space, memory), {}, None), Formulation.problems, list[int]()

    def with_more_edges(self: Formulation, pins: Pins, rows: Sequence[MemoryRow], *more: Any) -> Sequence[Problem]:
        found = stated(self, pins, rows, *more)
        if len(rows) < 4:
            return found
        changed.append(len(rows))
        zeros = np.zeros([found[0].nodes[node].num_strategies for node in (0, -1)])
        edge = Edge((0, len(found[0].nodes) - 1), zeros, zeros.astype(np.int64))
        return [replace(each, edges=(edge, *each.edges)) for each in found]

    monkeypatch.setattr(Formulation, "problems", with_more_edges)
    found = least_peak(Formulation(space, memory), {}, None)
    assert changed and found.is_proven and found.peak_bytes == expected.peak_bytes


def test_it_keeps_to_pins() -> None:
    space = space_of(TwoLinears(), (X_BD,), load("cpu"))
    free = least_peak(Formulation(space, MemoryModel(space)), {}, None)
    number = space.index["p_up_weight"]
    others = np.arange(len(space.decisions[number].candidates.strategies)) != free.choices[number]
    pinned = least_peak(Formulation(space, MemoryModel(space)), {number: others}, None)
    assert pinned.peak_bytes > free.peak_bytes and others[pinned.choices[number]]


def test_a_brief_refusal_does_not_work_out_what_pins_are_worth() -> None:
    space = space_of(TwoLinears(), (X_BD,), load("cpu"))
    free, number = least_peak(Formulation(space, MemoryModel(space)), {}, None), space.index["p_up_weight"]
    pins = {number: np.arange(len(space.decisions[number].candidates.strategies)) != free.choices[number]}
    settings = Settings(Memory(free.peak_bytes))
    with pytest.raises(InfeasibleError, match=r"without the pin on 'up\.weight' the least is"):
        make_plan(space, pins, settings)
    with pytest.raises(
        InfeasibleError, match=r"per device, but the least that was found is .* less than [^;:]*B\.$"
    ) as caught:
        make_plan(space, pins, replace(settings, is_brief=True))
    assert "without" not in str(caught.value)


SPACES = {
    "linears": lambda: space_of(TwoLinears(), (X_BD,), load("cpu")),
    "attention": lambda: space_of(Attention(False), (IDS_BS,), load("cpu"), dp=2, tp=2),
    "layers": lambda: space_of(Layers(), (torch.ones(16, 8),), load("cpu"), dp=2, tp=2),
    "gpt2": lambda: space_of(FAMILIES["gpt2"].build(), FAMILIES["gpt2"].inputs(0)[1], load("cpu"), dp=2, tp=2),
}


def peak_within(space: Space, limit: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # plans near the least are seldom proven the fastest
        return make_plan(space, {}, Settings(Memory(limit), Search(time_limit=40.0)))[0].peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linears", "attention", "layers", "gpt2"])
def test_every_limit_down_to_the_least_found_gives_a_plan_and_one_byte_less_the_refusal_of_it(name: str) -> None:
    """Check plans at every limit down to the stated least peak, and the refusal one byte below it.

    The refusal is only expected if the least is proven; otherwise a plan may exist below it.
    """
    space = SPACES[name]()
    free = make_plan(space, {})[0].peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        peak_within(space, 1)
    stated = re.search(r"(?:every choice needs at|the least that was found is).*? \((\d+) bytes\)", str(caught.value))
    assert stated is not None
    least = int(stated[1])
    for share in (1.0, 0.5, 0.1, 0.0):
        limit = int(least + share * (free - least))
        assert peak_within(space, limit) <= limit
    if "every choice needs at least" not in str(caught.value):
        with suppress(InfeasibleError):
            assert peak_within(space, least - 1) < least
        return
    with pytest.raises(InfeasibleError, match=rf"the memory limit is .* \({least - 1} bytes\) .* \({least} bytes\)"):
        peak_within(space, least - 1)


def test_rows_state_the_same_problem_whether_or_not_the_mode_matters_at_their_moments() -> None:
    """A row in which recomputation changes nothing had other edges than one in which it does."""
    space = SPACES["gpt2"]()
    memory = MemoryModel(space)
    modes = dict.fromkeys(memory.lifetimes.segments, "")
    assert modes
    rows = tuple(MemoryRow(((moment, 1),)) for moment in range(0, 4 * len(memory.lifetimes.calls), 13))
    problems = Formulation(space, memory).problems({}, rows, None, modes)
    alone = [Formulation(space, memory).problem({}, row, None, modes) for row in rows]
    assert len({tuple(edge.ends for edge in each.edges) for each in alone}) > 1
    for each, one in zip(problems, alone, strict=True):
        assert [edge.ends for edge in each.edges] == [edge.ends for edge in problems[0].edges]
        choices = tuple(node.num_strategies - 1 for node in each.nodes)
        assert each.cost_of(choices) == pytest.approx(one.cost_of(choices))


def test_what_is_held_in_a_row_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SPACES["layers"]()
    memory = MemoryModel(space)
    rows = [MemoryRow(((moment, 1),)) for moment in (0, len(memory.lifetimes.calls))]
    requested, worked_out = [], formulation.bytes_in
    monkeypatch.setattr(formulation, "bytes_in", lambda *of: requested.append(of[2]) or worked_out(*of))
    stated = Formulation(space, memory)
    stated.problems({}, rows[:1])
    stated.problems({}, rows)
    assert requested == [row for row in rows for _ in (*space.decisions, *space.edges)]


def test_the_problem_of_a_row_that_was_requested_before_is_not_stated_again() -> None:
    space = SPACES["layers"]()
    memory = MemoryModel(space)
    modes, count = dict.fromkeys(memory.lifetimes.segments, ""), len(memory.lifetimes.calls)
    rows = [MemoryRow(((moment, 1),)) for moment in (count - 1, count - 2, 0)]
    stated = Formulation(space, memory)
    first = stated.problems({}, rows[:2], 10**9, modes)
    stated.problem({})  # one without a row is another
    more = stated.problems({}, rows, 10**9, modes)
    assert more[:2] == first
    for requested in ({"limit": 10**8, "modes": modes}, {"limit": 10**9, "modes": dict.fromkeys(modes, "none")}):
        changed, alone = (
            stated.problems({}, rows, **requested),
            Formulation(space, memory).problems({}, rows, **requested),
        )
        for each, one in zip(changed, alone, strict=True):
            assert each not in more and each.budget == one.budget == requested["limit"]
            choices = tuple(int(np.isfinite(node.seconds).argmax()) for node in each.nodes)
            assert each.cost_of(choices) == one.cost_of(choices)


@pytest.mark.parametrize("microbatches", [Microbatches(), Microbatches(6, 3), Microbatches(3, 3)])
@pytest.mark.parametrize("name", ["attention", "layers"])
def test_rows_count_what_the_prediction_counts_in_the_forward_too(name: str, microbatches: Microbatches) -> None:
    space = SPACES[name]()
    memory = MemoryModel(space, microbatches)
    _, choices = make_plan(space, {}, microbatches=microbatches)
    predicted = bytes_by_moment(memory, choices, {})
    assert (predicted > 0).sum() >= 2 * len(memory.lifetimes.calls)
    for moment in predicted.nonzero()[0].tolist():
        assert at_moment(memory, choices, moment) == predicted[moment], moment
