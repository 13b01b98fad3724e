"""Cuts that are moved by simulation: never worse, within the pins, and better where ranks share stages unevenly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.schedules.schedule import Schedule
from autopar.pipeline.stages import refinement
from autopar.pipeline.stages.cuts import BlockCost, CutProblem, best_cuts
from autopar.pipeline.stages.refinement import refined, simulated_seconds


def _problem(seconds: list[float], schedule: Schedule, pins: dict[int, int] | None = None) -> CutProblem:
    blocks = tuple(BlockCost(each, each, each) for each in seconds)
    return CutProblem(blocks, (0.0,) * len(blocks), schedule, pins or {})


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
    assert simulated_seconds(problem, found) <= simulated_seconds(problem, starts)
    ends = (*found[1:], len(seconds))
    assert all(a < b for a, b in zip(found, ends, strict=True)) and found[stage] <= block < ends[stage]


def test_a_long_block_on_a_rank_leaves_the_rest_to_the_other() -> None:
    schedule = Schedule("zbv", 2, 8, 2)
    problem = _problem([1.0] * 10 + [6.0], schedule)
    found = refined(problem, best_cuts(problem).starts)
    every = [(0, *cuts) for cuts in itertools.combinations(range(1, 11), 3)]
    assert simulated_seconds(problem, found) == pytest.approx(min(simulated_seconds(problem, each) for each in every))
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
