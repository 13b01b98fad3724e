"""Schedules and micro-batches that the user leaves open are those of least simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PipelineError
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.choice import SEVERAL_STAGES, Option, recommend
from autopar.planning.pipeline.schedules.schedule import NAMES, Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate
from tests.support.options import by_flag


def _equal(
    num_ranks: int, batch_size: int, overhead: float = 0.0, send: float = 0.0
) -> Callable[[int, int], Sequence[StageSeconds] | None]:
    """A model of equal stages: seconds shrink with the micro-batch, but for an overhead and a transfer of each."""

    def seconds_of(microbatches: int, chunks: int) -> Sequence[StageSeconds]:
        part = batch_size / microbatches / chunks / num_ranks
        each = StageSeconds(part + overhead, part + overhead, part + overhead, send, send)
        return [each] * (num_ranks * chunks)

    return seconds_of


def _key(option: Option) -> tuple[str, int, int]:
    return option.schedule.name, option.schedule.num_microbatches, option.schedule.chunks


def test_options_are_sorted_by_simulated_seconds() -> None:
    options = recommend(4, 16, 32, _equal(4, 16, 0.01, 0.02))
    seconds = [option.seconds for option in options]
    assert seconds == sorted(seconds)
    for option in options:
        timeline = simulate(option.schedule, _equal(4, 16, 0.01, 0.02)(*_key(option)[1:]) or [])
        assert (option.seconds, option.bubble) == (timeline.seconds, timeline.bubble)


def test_of_options_with_equal_seconds_the_one_that_keeps_less_is_first() -> None:
    options = recommend(4, 8, 32, _equal(4, 8), schedules=("gpipe", "1f1b"), microbatches=8)
    assert [_key(option) for option in options] == [("1f1b", 8, 1), ("gpipe", 8, 1)]
    assert [option.seconds for option in options] == pytest.approx([8.25, 8.25])
    assert [option.in_flight for option in options] == [(4, 3, 2, 1), (8, 8, 8, 8)]
    assert [option.resident for option in options] == [0.5, 1.0]


def test_an_overhead_of_each_micro_batch_makes_fewer_of_them_best() -> None:
    free = recommend(4, 64, 8, _equal(4, 64), schedules=("1f1b",))
    expensive = recommend(4, 64, 8, _equal(4, 64, overhead=0.5), schedules=("1f1b",))
    assert free[0].schedule.num_microbatches == 16
    assert expensive[0].schedule.num_microbatches == 8


def test_expensive_transfers_make_one_stage_per_rank_best() -> None:
    cheap, expensive = recommend(4, 8, 32, _equal(4, 8)), recommend(4, 8, 32, _equal(4, 8, send=4.0))
    assert cheap[0].schedule.chunks == 2
    assert expensive[0].schedule.chunks == 1


def test_micro_batches_are_divisors_of_the_batch_up_to_four_per_stage() -> None:
    options = recommend(2, 24, 2, _equal(2, 24), schedules=("gpipe",))
    assert sorted(option.schedule.num_microbatches for option in options) == [1, 2, 3, 4, 6, 8]


def test_several_stages_per_rank_need_enough_blocks() -> None:
    assert {option.schedule.chunks for option in recommend(4, 8, 8, _equal(4, 8))} == {1, 2}
    assert {option.schedule.chunks for option in recommend(4, 8, 7, _equal(4, 8))} == {1}


def test_what_does_not_fit_is_left_out_and_requested_once() -> None:
    requested: list[tuple[int, int]] = []

    def seconds_of(microbatches: int, chunks: int) -> Sequence[StageSeconds] | None:
        requested.append((microbatches, chunks))
        return None if microbatches < 4 else _equal(2, 8)(microbatches, chunks)

    options = recommend(2, 8, 16, seconds_of)
    assert {option.schedule.num_microbatches for option in options} == {4, 8}
    assert len(requested) == len(set(requested))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_that_a_user_names_gets_its_stages_per_rank(name: str) -> None:
    options = recommend(2, 8, 16, _equal(2, 8), schedules=(name,))
    assert {option.schedule.chunks for option in options} == {2 if name in SEVERAL_STAGES else 1}


def test_given_micro_batches_and_chunks_are_kept() -> None:
    options = recommend(2, 8, 16, _equal(2, 8), schedules=("interleaved_1f1b",), microbatches=4, chunks=3)
    assert [option.schedule for option in options] == [Schedule("interleaved_1f1b", 2, 4, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"microbatches": 3},
            "microbatches=3 does not divide a batch of 8 samples per pipeline. Use one of 1, 2, 4, 8",
        ),
        ({"microbatches": 2, "schedules": ("1f1b",)}, "found 2 micro-batches for 4 stages. Use microbatches=4 or more"),
        ({"num_blocks": 3}, "4 pipeline ranks need 4 stages; the model has 3 blocks to cut between. Use a shorter"),
        (
            {"fits": False, "microbatches": 8},
            "fits into the memory of 4 pipeline ranks; tried .*: 8 with 1, 8 with 2. Use",
        ),
    ],
)
def test_nothing_that_can_run_is_an_error_that_says_why(arguments: dict[str, object], message: str) -> None:
    given = {"num_blocks": 16, "fits": True} | arguments
    seconds_of = _equal(4, 8) if given.pop("fits") else lambda microbatches, chunks: None
    with pytest.raises(PipelineError, match=message):
        recommend(num_ranks=4, batch_size=8, seconds_of=seconds_of, **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("chunks", "microbatches"), [(5, 64), (12, 64)])
def test_as_many_stages_and_micro_batches_are_planned_as_are_requested(chunks: int, microbatches: int) -> None:
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(24))), (torch.zeros(128, 8),)
    options = {"schedule": "interleaved_1f1b", "stages_per_rank": chunks, "microbatches": microbatches}
    plan = autopar.plan(model, autopar.Mesh({"pp": 2}, hardware="cpu"), batch, **by_flag(**options))  # pyright: ignore
    assert isinstance(plan, PipelinePlan)
    assert (plan.schedule.chunks, plan.schedule.num_microbatches, len(plan.stages)) == (
        chunks,
        microbatches,
        2 * chunks,
    )


def test_micro_batches_may_be_smaller_than_all_devices_of_a_stage_can_share() -> None:
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), (torch.zeros(16, 8),)
    mesh = autopar.Mesh({"pp": 2, "dp": 2, "tp": 2}, hardware="cpu")
    plan = autopar.plan(model, mesh, batch, microbatches=8)
    assert isinstance(plan, PipelinePlan)
    assert plan.schedule.num_microbatches == 8


def test_micro_batches_have_samples_for_the_axes_of_a_preset() -> None:
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), (torch.zeros(8, 8),)
    mesh = autopar.Mesh({"pp": 2, "dp": 4, "tp": 4}, hardware="cpu")  # 8 samples do not divide over 16 devices
    plan = autopar.plan(model, mesh, batch, strategy="zero1+megatron")
    assert isinstance(plan, PipelinePlan)
    assert plan.schedule.num_microbatches in (1, 2)
