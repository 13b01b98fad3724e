"""Schedules of a pipeline: orders that can run, the micro-batches in flight, and how long a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from autopar.errors import PipelineError
from autopar.planning.pipeline.schedules.schedule import NAMES, Action, Schedule
from autopar.planning.pipeline.schedules.simulation import Slice, StageSeconds, Timeline, simulate

FLUSHING = ("gpipe", "1f1b", "pipedream")
"""One stage per rank, and the pipeline runs empty at the end of a step."""
WHOLE_SECONDS = st.integers(0, 20).map(float)


def _valid(names: Sequence[str] = NAMES) -> Iterator[Schedule]:
    """Every schedule of up to four ranks, three chunks and nine micro-batches that can be made."""
    for name in names:
        for num_ranks in range(1, 5):
            for chunks in range(1, 4):
                for num_microbatches in range(1, 10):
                    try:
                        yield Schedule(name, num_ranks, num_microbatches, chunks)
                    except PipelineError:
                        continue


VALID = list(_valid())


def _kinds(schedule: Schedule, stage: int, microbatch: int) -> str:
    order = schedule.orders[schedule.rank_of(stage)]
    return "".join(step.kind for step in order if (step.stage, step.microbatch) == (stage, microbatch))


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_runs_every_micro_batch_forward_and_backward_once(name: str) -> None:
    for schedule in _valid([name]):
        assert sum(len(order) for order in schedule.orders) == sum(
            len(_kinds(schedule, stage, microbatch))
            for stage in range(schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
        )
        for stage in range(schedule.num_stages):
            for microbatch in range(schedule.num_microbatches):
                assert _kinds(schedule, stage, microbatch) in ("FB", "FIW"), (schedule, stage, microbatch)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_runs_its_own_stages_only(name: str) -> None:
    for schedule in _valid([name]):
        for rank, order in enumerate(schedule.orders):
            assert {step.stage for step in order} == set(schedule.stages_of(rank))


@pytest.mark.parametrize("name", NAMES)
def test_no_order_waits_for_itself(name: str) -> None:
    for schedule in _valid([name]):
        timeline = simulate(schedule, [StageSeconds(1, 1, 1)] * schedule.num_stages)
        assert len(timeline.slices) == sum(map(len, schedule.orders))


def test_stages_lie_on_ranks_in_a_loop_or_in_a_v() -> None:
    loop, v = Schedule("interleaved_1f1b", 3, 6, 2), Schedule("zbv", 3, 6, 2)
    assert [loop.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [v.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert loop.stages_of(1) == (1, 4)
    assert v.stages_of(0) == (0, 5)


def test_the_last_rank_of_1f1b_alternates_from_its_first_micro_batch_on() -> None:
    assert " ".join(map(str, Schedule("1f1b", 2, 3).orders[1])) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert " ".join(map(str, Schedule("1f1b", 2, 3).orders[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"


def test_overlapped_pairs_are_two_steps() -> None:
    order = Schedule("dualpipev", 2, 4, 2).orders[0]
    assert Action("F", 3, 1) in order
    assert Counter(step.kind for step in order)["F"] == 8


def test_pipedream_runs_in_the_order_of_1f1b() -> None:
    assert Schedule("pipedream", 4, 8).orders == Schedule("1f1b", 4, 8).orders


def test_pipedream_takes_fewer_micro_batches_than_stages() -> None:
    assert " ".join(map(str, Schedule("pipedream", 4, 2).orders[0])) == "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule("gpipe", 4, 6), [6, 6, 6, 6]),
        (Schedule("1f1b", 4, 6), [4, 3, 2, 1]),
        (Schedule("pipedream", 4, 2), [2, 2, 2, 1]),
        (Schedule("zbv", 2, 6, 2), [4, 3, 2, 1]),
    ],
)
def test_micro_batches_in_flight_are_those_forward_and_not_yet_backward(
    schedule: Schedule, expected: list[int]
) -> None:
    assert [schedule.in_flight(stage) for stage in range(schedule.num_stages)] == expected


def test_a_micro_batch_is_in_flight_until_the_gradient_of_its_weights_is_there() -> None:
    late = Schedule("interleaved_zero_bubble", 4, 8)
    assert [step.kind for step in late.orders[3]][:5] == ["F", "I", "F", "I", "F"]
    assert late.in_flight(3) == 4


def test_the_class_that_runs_a_schedule_is_pytorchs() -> None:
    assert Schedule("zbv", 2, 4, 2).torch_class is ScheduleZBVZeroBubble
    assert Schedule("interleaved_1f1b", 2, 4, 2).torch_class is ScheduleInterleaved1F1B
    assert Schedule("pipedream", 2, 4).torch_class is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F1B", 2, 4, 1), r'schedule="1F1B"\) is unknown. Use one of .gpipe., .1f1b.'),
        (("gpipe", 2, 0, 1), r'"gpipe" was given microbatches=0; it needs 1 or more. Use microbatches=1'),
        (("gpipe", 2, 4, 2), r'"gpipe" runs one stage per rank; found Pipeline\(stages_per_rank=2\). Use Pipeline'),
        (("zbv", 2, 4, 1), r'"zbv" needs two stages per rank; found Pipeline\(stages_per_rank=1\). Use Pipeline'),
        (("1f1b", 4, 2, 1), r"at least as many micro-batches as stages; found 2 micro-batches for 4 stages. Use micro"),
        (("dualpipev", 2, 3, 2), r"found 3 micro-batches for 4 stages. Use microbatches=4 or more"),
        (("interleaved_1f1b", 4, 9, 2), r"9 micro-batches do not divide into 2 rounds. Use microbatches=8 or 10"),
        (("interleaved_zero_bubble", 2, 5, 2), r"5 micro-batches do not divide into 2 rounds. Use microbatches=4 or 6"),
    ],
)
def test_what_a_schedule_cannot_run_is_an_error(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Schedule(*arguments)


@given(st.sampled_from(FLUSHING), st.integers(1, 5), st.integers(0, 6), WHOLE_SECONDS, WHOLE_SECONDS, WHOLE_SECONDS)
@settings(max_examples=60, deadline=None)
def test_equal_stages_take_the_time_of_the_closed_form(
    name: str, ranks: int, more: int, forward: float, inputs: float, weights: float
) -> None:
    microbatches = ranks + more
    timeline = simulate(Schedule(name, ranks, microbatches), [StageSeconds(forward, inputs, weights)] * ranks)
    assert timeline.seconds == (microbatches + ranks - 1) * (forward + inputs + weights)
    if timeline.seconds > 0:
        assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), WHOLE_SECONDS, WHOLE_SECONDS, WHOLE_SECONDS)
@settings(max_examples=60, deadline=None)
def test_interleaving_equal_stages_is_never_longer_than_1f1b(
    ranks: int, rounds: int, chunks: int, forward: float, inputs: float, weights: float
) -> None:
    whole = StageSeconds(chunks * forward, chunks * inputs, chunks * weights)
    plain = simulate(Schedule("1f1b", ranks, rounds * ranks), [whole] * ranks)
    interleaved = Schedule("interleaved_1f1b", ranks, rounds * ranks, chunks)
    part = StageSeconds(forward, inputs, weights)
    assert simulate(interleaved, [part] * interleaved.num_stages).seconds <= plain.seconds


@st.composite
def _timed(draw: st.DrawFn) -> tuple[Schedule, list[StageSeconds]]:
    """A schedule and what its stages take, transfers and work at the end of the step included."""
    schedule = draw(st.sampled_from(VALID))
    return schedule, [StageSeconds(*(draw(WHOLE_SECONDS) for _ in range(6))) for _ in range(schedule.num_stages)]


def _arrivals(schedule: Schedule, seconds: Sequence[StageSeconds], timeline: Timeline) -> Iterator[tuple[Slice, float]]:
    """Every computation, with the time at which all that it reads is on its rank."""
    ends = {(each.kind, each.stage, each.microbatch): each.end for each in timeline.slices}
    ends |= {("I", stage, microbatch): end for (kind, stage, microbatch), end in ends.items() if kind == "B"}
    for each in timeline.slices:
        reads = {"F": "F", "B": "I", "I": "I", "W": "I"}[each.kind]
        other = each.stage + {"F": -1, "B": 1, "I": 1, "W": 0}[each.kind]
        arrival = 0.0 if each.kind == "F" else ends["F", each.stage, each.microbatch]
        if 0 <= other < schedule.num_stages:
            sent = seconds[other].send_forward if each.kind == "F" else seconds[other].send_backward
            near = schedule.rank_of(other) == each.rank
            arrival = max(arrival, ends[reads, other, each.microbatch] + (0.0 if near else sent))
        yield each, arrival


@given(_timed())
@settings(max_examples=80, deadline=None)
def test_a_step_is_as_long_as_its_busiest_rank_and_its_longest_chain_at_least(
    timed: tuple[Schedule, list[StageSeconds]],
) -> None:
    schedule, seconds = timed
    timeline = simulate(schedule, seconds)
    for rank in range(schedule.num_ranks):
        own = [seconds[stage] for stage in schedule.stages_of(rank)]
        each = sum(stage.forward + stage.backward_input + stage.backward_weight for stage in own)
        assert timeline.seconds >= schedule.num_microbatches * each + sum(stage.once for stage in own)
    chain = seconds[0].once + sum(stage.forward + stage.backward_input for stage in seconds)
    for before, after in zip(range(schedule.num_stages), range(1, schedule.num_stages), strict=False):
        if schedule.rank_of(before) != schedule.rank_of(after):
            chain += seconds[before].send_forward + seconds[after].send_backward
    assert timeline.seconds >= chain


@given(_timed())
@settings(max_examples=80, deadline=None)
def test_a_computation_starts_when_its_rank_is_free_and_all_that_it_reads_has_arrived(
    timed: tuple[Schedule, list[StageSeconds]],
) -> None:
    schedule, seconds = timed
    at_once = [replace(stage, once=0.0) for stage in seconds]
    free = [0.0] * schedule.num_ranks
    for each, arrival in _arrivals(schedule, at_once, simulate(schedule, at_once)):
        assert each.start == max(free[each.rank], arrival)
        free[each.rank] = each.end


def test_the_work_at_the_end_of_a_step_follows_the_last_backward_of_the_rank() -> None:
    timeline = simulate(Schedule("1f1b", 2, 2), [StageSeconds(1, 1, 1, once=5), StageSeconds(1, 1, 1, once=2)])
    once = [each for each in timeline.slices if each.kind == "once"]
    assert [(each.rank, each.microbatch, each.start, each.end) for each in once] == [(0, None, 9, 14), (1, None, 7, 9)]
    assert timeline.seconds == 14


def test_what_is_left_of_reductions_is_waited_for_before_the_work_at_the_end() -> None:
    reducing = StageSeconds(1, 1, 1, once=5, last_backward=1, reducing=3, reductions=4)
    timeline = simulate(Schedule("1f1b", 2, 2), [reducing, StageSeconds(1, 1, 1, once=2)])
    once = [(each.start, each.end) for each in timeline.slices if each.kind == "once"]
    assert once == [(9 + 1 + 3, 18), (7, 9)]


def test_reductions_of_a_rank_pass_next_to_its_further_stages_one_after_the_other() -> None:
    def once(reducing: float, reductions: float) -> list[float]:
        stages = [StageSeconds(1, 1, 1, once=1)] * 2
        stages[1] = replace(stages[1], reducing=reducing, reductions=reductions)
        stages[0] = replace(stages[0], reducing=1, reductions=2)
        return [each.start for each in simulate(Schedule("zbv", 1, 2, 2), stages).slices if each.kind == "once"]

    assert once(0, 0) == [13, 14], "a second behind its last backward"
    assert once(1, 1) == [13, 14], "the other stage's are over before"
    assert once(20, 20)[0] > once(0, 0)[0] + 10, "behind those of the other stage"


def test_reductions_slow_the_transfer_of_the_last_gradient_alone() -> None:
    usual, last = StageSeconds(1, 1, 1, send_backward=10), StageSeconds(1, 1, 1, send_backward=10, last_send=5)
    pair = Schedule("gpipe", 2, 1)
    assert simulate(pair, [usual, last]).seconds == simulate(pair, [usual, usual]).seconds + 5
    assert simulate(pair, [last, usual]).seconds == simulate(pair, [usual, usual]).seconds


def test_a_slower_transfer_makes_a_step_longer_and_none_is_paid_within_a_rank() -> None:
    near, far = StageSeconds(1, 1, 1), StageSeconds(1, 1, 1, send_forward=10, send_backward=10)
    alone, pair = Schedule("zbv", 1, 2, 2), Schedule("gpipe", 2, 1)
    assert simulate(alone, [far, far]).seconds == simulate(alone, [near, near]).seconds == 12
    assert simulate(pair, [far, far]).seconds == simulate(pair, [near, near]).seconds + 20
