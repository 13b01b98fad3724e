"""Cuts that are moved by simulation: never worse, within the pins, and better where ranks share stages unevenly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import simulate
from autopar.planning.pipeline.stages import refinement
from autopar.planning.pipeline.stages.cuts import BlockCost, CutProblem, best_cuts
from autopar.planning.pipeline.stages.refinement import refined, simulated_seconds, stages_of_blocks


def _problem(seconds: list[float], schedule: Schedule, pins: dict[int, int] | None = None) -> CutProblem:
    blocks = tuple(BlockCost(each, each, each) for each in seconds)
    return CutProblem(blocks, (0.0,) * len(blocks), schedule, pins or {})


def _simulated(problem: CutProblem, starts: Sequence[int]) -> float:
    return simulate(problem.schedule, stages_of_blocks(problem.blocks, problem.cut_seconds, starts)).seconds


schedules = st.sampled_from(
    [
        Schedule("zbv", 2, 4, 2),
        Schedule("dualpipev", 2, 6, 2),
        Schedule("interleaved_1f1b", 2, 4, 2),
        Schedule("interleaved_zero_bubble", 2, 4, 2),
    ]
)


@given(st.lists(st.floats(0.1, 3.0), min_size=4, max_size=9), schedules, st.data())
@settings(max_examples=40, deadline=None)
def test_a_refined_cut_is_never_slower_and_keeps_to_the_pins(
    seconds: list[float], schedule: Schedule, data: st.DataObject
) -> None:
    block = data.draw(st.integers(1, len(seconds) - 2))
    stage = data.draw(st.integers(max(0, 4 - (len(seconds) - block)), min(block, 3)))
    problem = _problem(seconds, schedule, {block: stage})
    starts = best_cuts(problem).starts
    found = refined(problem, starts)
    assert _simulated(problem, found) <= _simulated(problem, starts)
    ends = (*found[1:], len(seconds))
    assert all(a < b for a, b in zip(found, ends, strict=True)) and found[stage] <= block < ends[stage]


def test_a_long_block_on_a_rank_leaves_the_rest_to_the_other() -> None:
    schedule = Schedule("zbv", 2, 8, 2)
    problem = _problem([1.0] * 10 + [6.0], schedule)
    found = refined(problem, best_cuts(problem).starts)
    every = [(0, *cuts) for cuts in itertools.combinations(range(1, 11), 3)]
    assert _simulated(problem, found) == pytest.approx(min(_simulated(problem, each) for each in every))
    # Rank 0 has the first stage and the last, with the long block.
    assert found[3] == 10 and found[1] < 4


def test_a_bad_cut_of_one_stage_per_rank_is_mended() -> None:
    problem = _problem([1.0, 2.0, 3.0, 1.0], Schedule("1f1b", 2, 4))
    assert refined(problem, (0, 1)) == (0, 2)


def test_the_search_ends_when_enough_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "MOST_STEPS", 0)
    problem = _problem([1.0] * 10 + [6.0], Schedule("zbv", 2, 8, 2))
    starts = best_cuts(problem).starts
    assert refined(problem, starts) == starts


@given(st.lists(st.floats(0.1, 3.0), min_size=6, max_size=9), schedules, st.floats(0.0, 2.0), st.data())
@settings(max_examples=40, deadline=None)
def test_cuts_are_simulated_together_as_one_by_one(
    seconds: list[float], schedule: Schedule, transfer: float, data: st.DataObject
) -> None:
    blocks = tuple(BlockCost(each, 2 * each, each / 2, once=each / 3) for each in seconds)
    problem = CutProblem(blocks, (transfer,) * len(blocks), schedule)
    every = [(0, *cuts) for cuts in itertools.combinations(range(1, len(blocks)), schedule.num_stages - 1)]
    cuts = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=6))
    more = data.draw(st.lists(st.floats(0.0, 2.0), min_size=schedule.num_stages, max_size=schedule.num_stages))

    def one_by_one(starts: tuple[int, ...]) -> float:
        stages = stages_of_blocks(blocks, problem.cut_seconds, starts)
        slower = [replace(each, backward_input=each.backward_input + m) for each, m in zip(stages, more, strict=True)]
        return simulate(schedule, slower).seconds

    found = simulated_seconds(problem, cuts, lambda stage, first, end: more[stage])
    assert found.tolist() == pytest.approx([one_by_one(each) for each in cuts], rel=1e-9)


def test_under_a_limit_only_cuts_whose_stages_are_known_to_fit_are_taken() -> None:
    problem = _problem([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], Schedule("1f1b", 2, 4))
    assert refined(problem, (0, 1)) == (0, 3)
    assert refined(problem, (0, 1), lambda stage, first, end: 0.0 if end - first != 3 else math.inf) == (0, 2)
    # Each block more on the first stage costs it so much that it does not pay.
    assert refined(problem, (0, 1), lambda stage, first, end: 9.0 * (end - first) if stage == 0 else 0.0) == (0, 1)


def test_nothing_is_simulated_once_time_is_over() -> None:
    problem = _problem([1.0, 2.0, 3.0, 1.0], Schedule("1f1b", 2, 4))
    assert refined(problem, (0, 1), deadline=-math.inf) == (0, 1)
