"""Cuts into pipeline stages are the best there are: compared with every cut of small models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PipelineError, TimeLimitError
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate
from autopar.planning.pipeline.stages.cut_search import StageCosts, best_cuts_within
from autopar.planning.pipeline.stages.cuts import BlockCost, CutProblem, best_cuts, own_seconds, stages_of

SECONDS = st.integers(0, 12).map(float)
SCHEDULES = (
    Schedule("gpipe", 3, 1),
    Schedule("gpipe", 4, 6),
    Schedule("1f1b", 2, 4),
    Schedule("1f1b", 4, 5),
    Schedule("pipedream", 3, 2),
    Schedule("interleaved_1f1b", 2, 4, 2),
    Schedule("interleaved_1f1b", 2, 1, 2),
    Schedule("interleaved_zero_bubble", 2, 4, 2),
    Schedule("interleaved_1f1b", 1, 3, 3),
    Schedule("zbv", 2, 3, 2),
    Schedule("zbv", 1, 2, 2),
    Schedule("dualpipev", 2, 6, 2),
)
Exact = Mapping[tuple[int, int, int], float]


def _all_starts(problem: CutProblem) -> Iterator[tuple[int, ...]]:
    """Every cut that has the user's pins."""
    num_blocks = len(problem.blocks)
    for cuts in combinations(range(1, num_blocks), problem.schedule.num_stages - 1):
        starts = (0, *cuts)
        stage_of = [sum(start <= block for start in starts) - 1 for block in range(num_blocks)]
        if all(stage_of[block] == stage for block, stage in problem.pins.items()):
            yield starts


def _step_seconds(problem: CutProblem, starts: tuple[int, ...], exact: Exact | None = None) -> float:
    """The formulas of the module, written out again: filling, and the pace of the slowest stage of each pass."""
    schedule, ends = problem.schedule, (*starts, len(problem.blocks))
    seconds = []
    for stage, (first, end) in enumerate(pairwise(ends)):
        blocks = problem.blocks[first:end]
        own = sum(each.forward + each.backward_input + each.backward_weight for each in blocks)
        own += sum(each.once for each in blocks) / schedule.num_microbatches
        own = own if exact is None else exact[stage, first, end]
        for cut, other in ((first, stage - 1), (end, stage + 1)):
            if 0 <= other < schedule.num_stages and schedule.rank_of(other) != schedule.rank_of(stage):
                own += problem.cut_seconds[cut] / 2
        seconds.append(own)
    if inf in seconds:
        return inf
    m, p, v = schedule.num_microbatches, schedule.num_ranks, schedule.chunks
    paces = sum(max(seconds[first : first + p]) for first in range(0, p * v, p))
    if v == 1:
        return sum(seconds) + (m - 1) * max(seconds)
    if m < p:
        return sum(seconds) + (m - 1) / v * paces
    once = sum(each.once for each in problem.blocks) / m
    total = once + sum(each.forward + each.backward_input + each.backward_weight for each in problem.blocks)
    fill = p * sum(each**2 for each in seconds) / total if total else sum(seconds)
    return fill + (m - 1 / v) * paces


@st.composite
def _problems(draw: st.DrawFn) -> CutProblem:
    """A small model, a schedule, and now and then pins that some cut follows."""
    schedule = draw(st.sampled_from(SCHEDULES))
    num_blocks = draw(st.integers(schedule.num_stages, 9))
    blocks = tuple(BlockCost(draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(SECONDS)) for _ in range(num_blocks))
    transfers = tuple(draw(SECONDS) for _ in range(num_blocks))
    cuts = draw(st.permutations(range(1, num_blocks)))[: schedule.num_stages - 1]
    pinned = draw(st.sets(st.integers(0, num_blocks - 1), max_size=2))
    pins = {block: sum(cut <= block for cut in cuts) for block in pinned}
    return CutProblem(blocks, transfers, schedule, pins)


@given(_problems())
@settings(max_examples=100, deadline=None)
def test_no_cut_is_better(problem: CutProblem) -> None:
    cuts = best_cuts(problem)
    best = min(_step_seconds(problem, starts) for starts in _all_starts(problem))
    assert cuts.seconds == pytest.approx(best, rel=1e-9)
    assert cuts.starts in set(_all_starts(problem))
    assert _step_seconds(problem, cuts.starts) == pytest.approx(cuts.seconds, rel=1e-9)
    assert cuts.bound == cuts.seconds == problem.seconds_of(cuts.stage_seconds)


@given(_problems())
@settings(max_examples=50, deadline=None)
def test_stages_of_all_cuts_are_priced_and_none_with_blocks_of_another_stage(problem: CutProblem) -> None:
    finite = np.isfinite(own_seconds(problem))
    for starts in _all_starts(problem):
        assert all(finite[place] for place in stages_of(starts, len(problem.blocks)))
    for stage, first, end in np.argwhere(finite).tolist():
        assert first < end
        for block, other in problem.places:
            assert (first <= block < end) == (stage == other), f"stage {stage}, blocks {first}-{end}"


@pytest.mark.parametrize(
    ("layers", "schedule"),
    [
        (128, Schedule("interleaved_1f1b", 16, 32, 8)),
        (105, Schedule("interleaved_1f1b", 35, 280, 3)),
        (96, Schedule("interleaved_1f1b", 8, 64, 3)),
        (128, Schedule("1f1b", 64, 512)),
    ],
)
def test_many_equal_layers_are_cut_evenly(layers: int, schedule: Schedule) -> None:
    each = layers // schedule.num_stages
    cuts = best_cuts(CutProblem((BlockCost(1.0, 1.0, 1.0),) * layers, (0.1,) * layers, schedule))
    assert cuts.starts == tuple(range(0, layers, each))


@st.composite
def _exact(draw: st.DrawFn) -> tuple[CutProblem, Exact]:
    """A problem with the true seconds of every stage: above the sums of its blocks, infinite beyond a random memory."""
    problem = draw(_problems())
    num_blocks, schedule = len(problem.blocks), problem.schedule
    sizes = draw(st.lists(st.integers(1, 5), min_size=num_blocks, max_size=num_blocks))
    budget = [draw(st.sampled_from([4, 8, 12, 40, 40])) for _ in range(schedule.num_stages)]
    bytes_over = draw(st.lists(SECONDS, min_size=7, max_size=7))
    exact = {}
    for first, end in combinations(range(num_blocks + 1), 2):
        blocks = problem.blocks[first:end]
        least = sum(each.forward + each.backward_input + each.backward_weight for each in blocks)
        least += sum(each.once for each in blocks) / schedule.num_microbatches
        for stage in range(schedule.num_stages):
            more = bytes_over[(3 * first + 5 * end + stage) % len(bytes_over)]
            exact[stage, first, end] = least + more if sum(sizes[first:end]) <= budget[stage] else inf
    return problem, exact


@given(_exact())
@settings(max_examples=100, deadline=None)
def test_no_cut_is_better_by_the_true_seconds_of_stages_that_fit(case: tuple[CutProblem, Exact]) -> None:
    problem, exact = case
    requested: list[tuple[int, int, int]] = []

    def stage_cost(first: int, end: int, stage: int) -> float:
        requested.append((stage, first, end))
        return exact[stage, first, end]

    best = min(_step_seconds(problem, starts, exact) for starts in _all_starts(problem))
    if best == inf:
        with pytest.raises(
            PipelineError, match=r"no cut into . stages fits into memory: stage . does not fit even with"
        ):
            best_cuts_within(problem, StageCosts(stage_cost))
    else:
        cuts = best_cuts_within(problem, StageCosts(stage_cost))
        assert cuts.seconds == pytest.approx(best, rel=1e-9)
        assert _step_seconds(problem, cuts.starts, exact) == pytest.approx(best, rel=1e-9)
    assert len(requested) == len(set(requested)), "a stage was asked for twice"


@given(_exact())
@settings(max_examples=100, deadline=None)
def test_a_tolerated_cut_is_no_further_from_the_best_than_allowed(case: tuple[CutProblem, Exact]) -> None:
    problem, exact = case
    best = min(_step_seconds(problem, starts, exact) for starts in _all_starts(problem))
    if best < inf:
        cuts = best_cuts_within(problem, StageCosts(lambda first, end, stage: exact[stage, first, end]), tolerance=0.25)
        assert cuts.bound <= best * (1 + 1e-9)
        assert cuts.seconds <= 1.25 * best * (1 + 1e-9)
        assert _step_seconds(problem, cuts.starts, exact) == pytest.approx(cuts.seconds, rel=1e-9)


def _problem(costs: list[float], schedule: Schedule, pins: Mapping[int, int] | None = None) -> CutProblem:
    blocks = tuple(BlockCost(cost, 0, 0, name=f"layers.{index}") for index, cost in enumerate(costs))
    return CutProblem(blocks, (0.0,) * len(costs), schedule, pins or {})


@given(st.lists(SECONDS, min_size=1, max_size=5), st.integers(1, 6))
def test_the_formula_is_the_simulated_time_of_gpipe(forward: list[float], num_microbatches: int) -> None:
    schedule = Schedule("gpipe", len(forward), num_microbatches)
    problem = _problem([3 * each for each in forward], schedule)
    timeline = simulate(schedule, [StageSeconds(each, each, each) for each in forward])
    assert best_cuts(problem).seconds == timeline.seconds


@pytest.mark.parametrize("schedule", [Schedule("1f1b", 4, 7), Schedule("interleaved_1f1b", 3, 6, 2)])
def test_the_formula_is_the_simulated_time_of_equal_stages(schedule: Schedule) -> None:
    timeline = simulate(schedule, [StageSeconds(1, 1, 2)] * schedule.num_stages)
    assert best_cuts(_problem([4.0] * schedule.num_stages, schedule)).seconds == timeline.seconds


def test_a_big_head_gets_fewer_layers_next_to_it() -> None:
    assert best_cuts(_problem([1, 1, 1, 1, 1, 1, 1, 5], Schedule("1f1b", 2, 8))).starts == (0, 6)


def test_a_cheap_transfer_decides_between_equal_cuts() -> None:
    blocks = (BlockCost(1, 1, 1),) * 3
    problem = CutProblem(blocks, (0, 9, 1), Schedule("1f1b", 2, 4))
    assert best_cuts(problem).starts == (0, 2)


def test_a_transfer_within_a_rank_costs_nothing() -> None:
    problem = CutProblem((BlockCost(1, 0, 0),) * 4, (0.0, 0.0, 100.0, 0.0), Schedule("zbv", 2, 4, 2))
    assert best_cuts(problem).stage_seconds == (1, 1, 1, 1)


def test_work_once_per_step_is_spread_over_the_micro_batches() -> None:
    problem = CutProblem((BlockCost(1, 1, 1, once=8), BlockCost(1, 1, 1)), (0, 0), Schedule("gpipe", 2, 4))
    assert best_cuts(problem).stage_seconds == (5, 3)


def test_one_micro_batch_takes_as_long_by_all_cuts_and_the_most_even_one_is_taken() -> None:
    schedule = Schedule("interleaved_zero_bubble", 2, 1, 2)
    assert best_cuts(CutProblem((BlockCost(1.0, 1.0, 1.0),) * 12, (0.5,) * 12, schedule)).starts == (0, 3, 6, 9)


def test_130_blocks_on_16_stages_are_cut_evenly() -> None:
    costs = [40.0, *[10.0 + index % 3 for index in range(128)], 60.0]
    for schedule in (Schedule("1f1b", 16, 32), Schedule("zbv", 8, 32, 2), Schedule("interleaved_1f1b", 4, 16, 4)):
        cuts = best_cuts(_problem(costs, schedule))
        assert max(cuts.stage_seconds) < 1.3 * sum(costs) / 16


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            {1: 2},
            r"block 0 \(layers.0\) was to be in stage 0 and block 1 \(layers.1\) in stage 2, but 2 cuts do not fit",
        ),
        ({3: 1, 5: 0}, r"block 3 \(layers.3\) was to be in stage 1 and block 5 .* in stage 0, but stages follow the"),
        (
            {0: 1},
            r"block 0 .* in stage 0 and block 0 .* in stage 1, .* The first block is in stage 0 and the last in s",
        ),
        ({7: 0}, r"block 7 .* in stage 0 and block 7 .* in stage 2, .* the last in stage 2; pin blocks so that every"),
        ({2: 3}, r"block 2 \(layers.2\) is pinned to stage 3; there are 3 stages. Use a stage from 0 to 2"),
    ],
)
def test_pins_that_no_cut_follows_are_an_error(pins: dict[int, int], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        _problem([1.0] * 8, Schedule("gpipe", 3, 4), pins)


def test_more_stages_than_blocks_are_an_error() -> None:
    message = r"4 stages \(2 ranks with 2 each\) were requested for a model of 3 blocks; .* Use a shorter pipeline axis"
    with pytest.raises(PipelineError, match=message):
        _problem([1.0] * 3, Schedule("zbv", 2, 4, 2))


def test_memory_that_no_cut_fits_is_an_error_that_names_the_stage_and_its_blocks() -> None:
    message = (
        r"no cut into 2 stages fits into memory: stage 0 does not fit even with block 0 \(layers.0\). Use a longer"
    )
    with pytest.raises(PipelineError, match=message):
        best_cuts_within(
            _problem([1.0] * 4, Schedule("gpipe", 2, 4)),
            StageCosts(lambda first, end, stage: inf if first == 0 else end - first),
        )


def test_a_stage_that_is_faster_than_its_blocks_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="below its blocks"):
        best_cuts_within(_problem([1.0] * 4, Schedule("gpipe", 2, 4)), StageCosts(lambda first, end, stage: 0.5))


@given(_exact(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_search_that_begins_with_a_thought_ends_with_a_cut_that_fits_and_the_best_if_there_is_time(
    case: tuple[CutProblem, Exact], is_over: bool
) -> None:
    problem, exact = case
    fitting = [each for each in _all_starts(problem) if _step_seconds(problem, each, exact) < inf]
    if not fitting:
        return
    # All other stages are thought to take too long, and those of two cuts no time, of which one may not fit.
    thought = np.full((problem.schedule.num_stages, *(len(problem.blocks) + 1,) * 2), 1e6)
    for place in (
        *stages_of(fitting[-1], len(problem.blocks)),
        *stages_of(best_cuts(problem).starts, len(problem.blocks)),
    ):
        thought[place] = 0.0
    costs = StageCosts(
        lambda *place: exact[place[2], *place[:2]], is_over=lambda requested, has_cut: has_cut and is_over
    )
    cuts = best_cuts_within(problem, costs, thought=thought)
    best = min(_step_seconds(problem, starts, exact) for starts in fitting)
    assert cuts.bound <= best * (1 + 1e-9) and cuts.starts in fitting
    assert cuts.seconds == pytest.approx(_step_seconds(problem, cuts.starts, exact))
    assert is_over or cuts.seconds <= best * (1 + 1e-9)


@given(_exact(), st.integers(0, 6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_search_that_is_broken_off_has_a_cut_that_fits_with_a_bound(
    case: tuple[CutProblem, Exact], most: int, late: bool
) -> None:
    problem, exact = case
    best = min(_step_seconds(problem, starts, exact) for starts in _all_starts(problem))
    requested: list[tuple[int, int, int]] = []

    def seconds(first: int, end: int, stage: int) -> float:
        requested.append((first, end, stage))
        if late and len(requested) > most:
            raise TimeLimitError("the time limit passed")
        return exact[stage, first, end]

    costs = StageCosts(seconds, is_over=lambda requested, has_cut: not late and requested >= most)
    try:
        cuts = best_cuts_within(problem, costs)
    except (PipelineError, TimeLimitError):
        return  # no solved stages make a cut
    finally:
        assert late or len(requested) <= most, "more was asked for than there is time for"
    assert cuts.bound <= best * (1 + 1e-9) and cuts.seconds >= best * (1 - 1e-9)
    assert _step_seconds(problem, cuts.starts, exact) == pytest.approx(cuts.seconds, rel=1e-9)


@given(_exact(), st.lists(st.floats(0.0, 0.5), min_size=5, max_size=5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_stages_that_are_known_roughly_are_requested_more_closely_until_the_best_cut_is_known(
    case: tuple[CutProblem, Exact], open_shares: list[float], is_closer: bool
) -> None:
    problem, exact = case
    best = min(_step_seconds(problem, starts, exact) for starts in _all_starts(problem))
    if best == inf:
        return
    close: set[tuple[int, int, int]] = set()

    def share(first: int, end: int, stage: int) -> float:
        return 0.0 if (first, end, stage) in close else open_shares[(first + 2 * end + stage) % len(open_shares)]

    def seconds(first: int, end: int, stage: int) -> float:
        return exact[stage, first, end] * (1 + share(first, end, stage))

    def at_least(first: int, end: int, stage: int) -> float:
        return exact[stage, first, end] * (1 - share(first, end, stage))

    def closer(first: int, end: int, stage: int) -> bool:
        if not is_closer or (first, end, stage) in close:
            return False
        close.add((first, end, stage))
        return True

    cuts = best_cuts_within(problem, StageCosts(seconds, at_least=at_least, closer=closer))
    assert cuts.bound <= best * (1 + 1e-9) and cuts.seconds >= best * (1 - 1e-9)
    if is_closer:
        assert cuts.seconds == pytest.approx(best, rel=1e-9)


def test_only_the_stage_that_sets_the_pace_is_requested_more_closely() -> None:
    schedule, close = Schedule("1f1b", 4, 64), []

    def closer(first: int, end: int, stage: int) -> bool:
        close.append(stage)
        return len(close) == 1

    def seconds(first: int, end: int, stage: int) -> float:
        return (end - first) * (1.0 if close and stage == 1 else 1.25 if stage == 1 else 1.0625)

    costs = StageCosts(seconds, at_least=lambda first, end, stage: float(end - first), closer=closer)
    cuts = best_cuts_within(_problem([1.0] * 4, schedule), costs, tolerance=0.0625)
    assert close == [1] and cuts.bound == 67 and cuts.seconds <= 1.0625 * 67


def test_of_stages_of_equal_blocks_the_one_of_middling_flight_is_requested() -> None:
    """The fullest says what the others take at most, the middle one what half of them take at least."""
    schedule, requested = Schedule("1f1b", 8, 64), []

    def seconds(first: int, end: int, stage: int) -> float:
        requested.append(stage)
        return (end - first) * (1 + 0.01 * schedule.in_flight(stage))

    def at_most(first: int, end: int, stage: int) -> float:
        return 2 * (1 + 0.01 * schedule.in_flight(min(requested))) if requested and end - first == 2 else inf

    best_cuts_within(_problem([1.0] * 16, schedule), StageCosts(seconds, at_most), 0.0, [0] * 16)
    assert requested[:2] == [0, 4]


def test_no_cut_in_time_is_an_error_that_says_what_to_do() -> None:
    costs = StageCosts(lambda first, end, stage: float(end - first), is_over=lambda requested, has_cut: True)
    with pytest.raises(TimeLimitError, match="before stages that fit into memory were found; give it longer"):
        best_cuts_within(_problem([1.0] * 4, Schedule("gpipe", 2, 4)), costs)


def test_what_is_known_of_other_stages_is_not_requested() -> None:
    """Equal blocks: what the fullest stage takes is a bound for all others, and enough within the tolerance."""
    schedule, requested = Schedule("1f1b", 4, 8), []

    def seconds(first: int, end: int, stage: int) -> float:
        requested.append((end - first, stage))
        return (end - first) * (1 + 0.01 * schedule.in_flight(stage))

    def at_most(first: int, end: int, stage: int) -> float:
        known = [
            length * (1 + 0.01 * schedule.in_flight(other)) for length, other in requested if length == end - first
        ]
        return min(known, default=inf)

    cuts = best_cuts_within(_problem([1.0] * 8, schedule), StageCosts(seconds, at_most), tolerance=0.05)
    assert requested == [(2, 0)] and cuts.starts == (0, 2, 4, 6)
