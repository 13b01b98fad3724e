"""Stages of a pipeline, planned within a memory limit: their share of the time, and their warnings."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.planning.pipeline import stage_search
from autopar.planning.pipeline.masks import masks_of
from autopar.planning.pipeline.planned_blocks import planned_blocks
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.stage_samples import sampled
from autopar.planning.pipeline.stage_search import ROUGHLY, TOLERANCE, StageSearch
from autopar.planning.pipeline.stages.stage_bytes import MemoryBudget
from autopar.planning.settings import Settings
from autopar.solver.deadline import after
from tests.planning.pipeline.test_planner import request


def _search() -> StageSearch:
    """Build the stage search of a two-stage pipeline with an ample memory budget."""
    requested = request({"pp": 2}, Schedule("1f1b", 2, 4), num_layers=3)
    blocks = planned_blocks(requested, 2)
    nothing_known = (0.0,) * (len(blocks.blocks) + 1)
    return StageSearch(blocks, after(1000.0), (MemoryBudget(2**40, 2**40),) * 2, nothing_known)


def test_what_is_planned_more_closely_gets_more_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    search, given = _search(), list[float]()

    def solved(space: Any, pins: Any, settings: Settings, *more: Any) -> None:
        given.append(settings.search.time_limit)
        assert settings.is_brief, "nobody reads why a stage does not fit"
        raise InfeasibleError("nothing is looked for")

    monkeypatch.setattr(stage_search, "solved", solved)
    search.ask(0, 2, 0, ROUGHLY)
    search.ask(0, 2, 0, TOLERANCE)
    roughly, closely = given
    assert 50 < roughly < 70
    assert closely == pytest.approx(200, rel=0.05)


def test_where_a_stage_has_no_strategy_that_is_looked_at_it_has_all_that_the_user_leaves() -> None:
    search = _search()
    space, _ = search.narrowed(search.program(0, 2)[0], {})
    here = next(number for number, each in enumerate(space.decisions) if each.kind == "call")
    there = search.planned.whole.space.index[space.decisions[here].name]
    strategies = search.planned.whole.space.decisions[there].candidates.strategies
    none, first = np.zeros(len(strategies), dtype=bool), np.arange(len(strategies)) == 0
    by_user = {True: {there: first}, False: {}}
    masks = {
        is_pinned: masks_of(replace(search.planned, specified=specified, pins={there: none}), space, {})
        for is_pinned, specified in by_user.items()
    }
    assert here not in masks[False]
    in_stage = space.decisions[here].candidates.strategies
    assert masks[True][here].tolist() == [str(each) == str(strategies[0]) for each in in_stage]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_known_to_fit_fits_and_is_not_proven_where_nothing_else_is_found(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Check that choices known for the first stage, with two micro-batches in flight, fit the last one with one.

    They are not proven best if the search finds nothing else.
    """
    search = _search()
    known = replace(search.ask(0, 2, 0, ROUGHLY), least=1e-9)
    search.by_structure = defaultdict(list, {0: [known]})

    def nothing(*arguments: Any) -> None:
        raise InfeasibleError("no choices that were found keep as little as they may")

    monkeypatch.setattr(StageSearch, "_solved", nothing)
    again = search.ask(0, 2, stage, TOLERANCE)
    assert again.seconds == known.seconds
    assert again.least < known.seconds


def test_a_known_plan_that_fits_is_taken_where_a_search_ends_at_a_slower_one() -> None:
    search = _search()
    slow = search.ask(0, 2, 0, ROUGHLY)
    fast = replace(slow, seconds=slow.seconds / 2, budget=MemoryBudget(2**39, 2**39))
    search.by_structure = defaultdict(list, {0: [fast]})
    again = search.ask(0, 2, 0, ROUGHLY)
    assert again.seconds == fast.seconds and again.least <= fast.seconds
    search.by_structure = defaultdict(list, {0: [replace(fast, seconds=2 * slow.seconds)]})
    assert search.ask(0, 2, 0, ROUGHLY).seconds == slow.seconds


def test_the_least_bytes_of_equal_stages_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    search, requested = _search(), list[int]()

    def least_peak(formulation: Any, *more: Any) -> SimpleNamespace:
        requested.append(len(formulation.memory.space.decisions))
        return SimpleNamespace(peak_bytes=7 + len(requested))

    monkeypatch.setattr(stage_search, "least_peak", least_peak)
    assert [search.least(first, first + 1, 1) for first in (1, 2, 1)] == [8, 8, 8] and len(requested) == 1
    assert search.least(1, 3, 1) == 9 and search.least(1, 2, 0) == 10, "longer, and with more micro-batches in flight"


def test_stages_with_an_embedding_or_a_head_are_sampled_apart_from_stages_of_layers() -> None:
    requested = request({"pp": 2}, Schedule("interleaved_1f1b", 2, 4, 2), num_layers=6)
    blocks = planned_blocks(requested, 4)
    assert [block.name for block in blocks.blocks] == ["embedding", *(f"layers.{n}" for n in range(6)), "head"]
    until = (0.0, *accumulate(each.forward + each.backward_input + each.backward_weight for each in blocks.costs))
    search = StageSearch(blocks, after(1000.0), (None,) * 4, until)
    first, *layers, last = sampled(search, (0, 3, 5, 6), 2**40)
    assert {each.span for every in search.by_structure.values() for each in every} == {(0, 3), (3, 5), (6, 8)}
    assert first.size == last.size == 1.0 and [each.size for each in layers] == pytest.approx([1.0, 0.5])
    assert layers[0].seconds == layers[1].seconds != last.seconds
    assert min(each.lasting for each in first.samples) > min(each.lasting for each in layers[0].samples)
