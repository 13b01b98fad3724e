"""Choice of the schedule and the micro-batches that the user leaves open: all that may run are simulated.

More micro-batches shrink the bubble, (ranks - 1) / (micro-batches + ranks - 1) for GPipe and 1F1B, but run less work at
a time. Several stages per rank shrink it again, but need more transfers. Beyond four micro-batches per stage the bubble
is below a fifth, and little is left to gain. Options of equal time are ordered by memory: 1F1B before GPipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.errors import PipelineError
from autopar.planning.pipeline.schedules.schedule import NAMES, Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate

SecondsOf = Callable[[int, int], Sequence[StageSeconds] | None]
"""(micro-batches, chunks) to the seconds of every stage for one of these micro-batches; None if that does not fit."""

RECOMMENDED = ("1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
SEVERAL_STAGES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True, slots=True)
class Option:
    """A schedule, its predicted seconds and idle share, and the most micro-batches in flight on each stage."""

    schedule: Schedule
    seconds: float
    bubble: float
    in_flight: tuple[int, ...]

    @property
    def resident(self) -> float:
        """Activations that the fullest rank saves, as a share of what its layers save for the whole batch."""
        return float(_resident(self.schedule, self.in_flight))


def recommend(
    num_ranks: int,
    batch_size: int,
    num_blocks: int,
    seconds_of: SecondsOf,
    schedules: Sequence[str] = RECOMMENDED,
    microbatches: int | None = None,
    chunks: int | None = None,
) -> tuple[Option, ...]:
    """Return every schedule that can run, best first.

    `batch_size` is that of one replica of the pipeline. Left open, `microbatches` are the divisors of the batch size
    up to four per stage, and `chunks` is 2 where a schedule has several stages per rank.

    Raises:
        PipelineError: Nothing can run; says why the last candidate cannot, or that none fits into memory.
    """
    if microbatches is not None and (microbatches < 1 or batch_size % microbatches):
        raise PipelineError(
            f"microbatches={microbatches} does not divide a batch of {batch_size} samples per pipeline. "
            f"Use one of {', '.join(map(str, _divisors(batch_size)))}."
        )
    fewest = num_ranks * min(chunks_of(name, chunks) for name in schedules)
    if fewest > num_blocks:
        raise PipelineError(
            f"{num_ranks} pipeline ranks need {fewest} stages; the model has {num_blocks} blocks to cut between. "
            "Use a shorter pipeline axis or fewer stages_per_rank."
        )
    refused: list[PipelineError] = []
    options, requested = [], {}
    for name, number, stages in _candidates(num_ranks, batch_size, schedules, microbatches, chunks):
        try:
            schedule = Schedule(name, num_ranks, number, stages)
        except PipelineError as error:
            refused.append(error)
            continue
        if schedule.num_stages > num_blocks:
            continue
        key = (schedule.num_microbatches, schedule.chunks)
        requested[key] = requested[key] if key in requested else seconds_of(*key)
        if requested[key] is not None:
            options.append(_option(schedule, requested[key]))
    if not options:
        raise refused[-1] if not requested else PipelineError(_none_fits(num_ranks, sorted(requested)))
    return tuple(sorted(options, key=_rank))


def _candidates(
    num_ranks: int, batch_size: int, schedules: Sequence[str], microbatches: int | None, chunks: int | None
) -> Iterator[tuple[str, int, int]]:
    """Name, micro-batches and chunks of all that is tried."""
    for name in schedules:
        own = chunks_of(name, chunks)
        most = MICROBATCHES_PER_STAGE * num_ranks * own
        for each in _divisors(batch_size):
            if each <= most if microbatches is None else each == microbatches:
                yield name, each, own


def chunks_of(name: str | None, given: int | None) -> int:
    """Return the stages per rank: what is given, or the fewest that a schedule is made for."""
    return given if given is not None else 2 if name in SEVERAL_STAGES else 1


def _option(schedule: Schedule, seconds: Sequence[StageSeconds]) -> Option:
    timeline = simulate(schedule, seconds)
    in_flight = tuple(schedule.in_flight(stage) for stage in range(schedule.num_stages))
    return Option(schedule, timeline.seconds, timeline.bubble, in_flight)


def _rank(option: Option) -> tuple[float, Fraction, int, int]:
    """Return the sort key: seconds, up to rounding, then saved bytes, then simplicity."""
    schedule = option.schedule
    seconds = float(f"{option.seconds:.9g}")
    return seconds, _resident(schedule, option.in_flight), NAMES.index(schedule.name), schedule.num_microbatches


def _resident(schedule: Schedule, in_flight: Sequence[int]) -> Fraction:
    """Return the share of a batch's activations that the fullest rank saves, if its stages save equally much."""
    most = max(sum(in_flight[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    return Fraction(most, schedule.chunks * schedule.num_microbatches)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _none_fits(num_ranks: int, requested: Sequence[tuple[int, int]]) -> str:
    """Describe that every option that was tried needs more memory than there is."""
    tried = ", ".join(f"{microbatches} with {chunks}" for microbatches, chunks in requested)
    return (
        f"no schedule fits into the memory of {num_ranks} pipeline ranks; tried micro-batches with stages per rank: "
        f"{tried}. Use a longer pipeline axis, another axis to split storage, or a smaller batch."
    )
