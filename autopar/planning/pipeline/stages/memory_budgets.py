"""Memory budgets of a rank's stages, which share its memory.

Stages take turns: while one runs, the others keep lasting state (parameters, gradients, optimizer state) and
activations that wait for a backward. So they fit if, for each of them,

    peak(stage) + sum over the others of resident(other)  <=  memory

at all moments: while one has the most micro-batches in flight, others have fewer (`Schedule.in_flight_at_once`). A
stage of medium size is planned within several memory limits; these samples tell the value of memory. Less memory takes
longer, more micro-batches in flight take more memory, and longer stages take proportionally more of both. Each rank
selects one sample per stage so that they fit and their total seconds are least (`fastest`, a multiple-choice knapsack).
So memory goes to the stage that gains the most. Given these budgets, the seconds of samples determine the cut with
which the search begins (`estimates_in_budgets`).

Memory that the samples leave goes to stages in proportion to their micro-batches in flight. If no samples fit, stages
share all memory in that proportion. If that leaves no cut, each stage of an even cut gets the least that it needs
(`budgets_of_least_peaks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.stages.cheapest_cut import Floats
from autopar.planning.pipeline.stages.cuts import CutProblem, own_seconds, transfers
from autopar.planning.pipeline.stages.stage_bytes import Limit, MemoryBudget, StageBytes

MOST_PARTS = 4
"""Steps from one sample to the next, at most.

Some layers of a stage may be planned as in the one sample, the rest as in the other.
"""
LeastOf = Callable[[int, int, int], int]
"""(first block, end block, stage) to the least bytes that the stage takes at its fullest moment."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one micro-batch, and the memory of choices that take them."""

    seconds: float
    lasting: float
    """Bytes while others run, without those of micro-batches in flight."""
    running: float
    """Bytes at the fullest moment, saved ones excluded."""
    saved: float = 0.0
    """Bytes for each micro-batch in flight."""

    @classmethod
    def of(cls, seconds: float, stage_bytes: StageBytes, in_flight: int) -> tuple[Sample, ...]:
        """Return the sample of a stage; and one whose bytes at rest are constant, if these are fewer at most."""
        found = cls(seconds, stage_bytes.lasting, stage_bytes.running, stage_bytes.saved)
        if found.resident(in_flight) <= stage_bytes.resident:
            return (found,)
        return found, cls(seconds, stage_bytes.resident, stage_bytes.peak - stage_bytes.resident)

    def resident(self, in_flight: int) -> float:
        """Return the bytes while others run, with so many micro-batches in flight."""
        return self.lasting + in_flight * self.saved

    def scaled(self, size: float) -> Sample:
        """Return the sample of a stage with `size` times the blocks, which run one after the other."""
        return Sample(size * self.seconds, size * self.lasting, self.running, size * self.saved)

    def towards(self, other: Sample, share: float) -> Sample:
        """Interpolate towards another."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Sample(*((1 - share) * one + share * each for one, each in pairs))


SamplesOf = Callable[[int], Sequence[Sample]]
"""Stage → its samples."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of one stage, for a stage of a cut with the same kinds of blocks."""

    samples: Sequence[Sample]
    seconds: float
    """Seconds of the blocks that were sampled, without a memory limit."""
    num_blocks: int = MOST_PARTS
    """Number of the blocks that were sampled."""
    size: float = 1.0
    """Seconds of the stage's blocks, as multiples of `seconds`."""


def estimates_in_budgets(
    problem: CutProblem, memory: int, sampled: Sequence[Sampled]
) -> tuple[Floats, tuple[MemoryBudget, ...]]:
    """Return per-rank memory budgets and estimates of stages in them, from the samples of the stages of a cut.

    That is [stage, first block, end block], with transfers; infinite where nothing fits.
    """
    schedule, own = problem.schedule, own_seconds(problem)
    in_flight = [schedule.in_flight(stage) for stage in range(schedule.num_stages)]
    every = [_filled_in(of.samples, number, of.num_blocks) for of, number in zip(sampled, in_flight, strict=True)]
    scaled = [[each.scaled(of.size) for each in samples] for of, samples in zip(sampled, every, strict=True)]
    budgets = shared_budgets(schedule, memory, scaled.__getitem__)
    sizes = [seconds / of.seconds for seconds, of in zip(own, sampled, strict=True)]
    table = np.stack([_seconds_within(*each) for each in zip(sizes, every, budgets, in_flight, strict=True)])
    return np.maximum(table, own) + transfers(problem), budgets


def shared_budgets(schedule: Schedule, memory: int, samples: SamplesOf) -> tuple[MemoryBudget, ...]:
    """Return the memory budgets of all stages, given the samples of each; those of a rank fit together."""
    found = [MemoryBudget(0, 0)] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        stages, at_once = schedule.stages_of(rank), schedule.in_flight_at_once(rank)
        nothing = [Sample(0.0, 0, 0)] * len(stages)
        chosen = fastest([samples(stage) for stage in stages], memory, at_once) or nothing
        for stage, budget in zip(stages, _divided(schedule, memory, stages, chosen), strict=True):
            found[stage] = budget
    return tuple(found)


def fits_together(schedule: Schedule, memory: int, samples: SamplesOf) -> bool:
    """Return whether the stages of every rank, each with one of its samples, fit into its memory."""
    ranks = ((schedule.stages_of(rank), schedule.in_flight_at_once(rank)) for rank in range(schedule.num_ranks))
    return all(fastest([samples(stage) for stage in stages], memory, at_once) is not None for stages, at_once in ranks)


def budgets_of_least_peaks(
    schedule: Schedule, memory: int, starts: Sequence[int], num_blocks: int, least_of: LeastOf
) -> tuple[MemoryBudget, ...] | None:
    """Return the same for the stages of one cut, each with room for its least peak, as if all of a rank peaked at once.

    Returns None if a rank has too little memory; ranks behind it are not evaluated then.
    """
    spans, least = list(pairwise((*starts, num_blocks))), [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        left = memory
        for stage in schedule.stages_of(rank):
            least[stage] = least_of(*spans[stage], stage)
            left -= least[stage]
            if left < 0:
                return None
    return shared_budgets(schedule, memory, lambda stage: [Sample(0.0, least[stage], 0.0)])


def fastest(
    options: Sequence[Sequence[Sample]], memory: int, at_once: Sequence[Sequence[int]]
) -> tuple[Sample, ...] | None:
    """Return a sample for each stage of a rank, of the least seconds in all that fit together; None where none do.

    `at_once` are the micro-batches that each has in flight at some moments.
    """
    made: list[tuple[tuple[float, ...], tuple[Sample, ...]]] = [((0.0,) * (2 + len(at_once)), ())]
    for number, samples in enumerate(options):
        every = [
            (
                (
                    seconds + each.seconds,
                    max(most, each.running),
                    *(at + each.resident(flight[number]) for at, flight in zip(resident, at_once, strict=True)),
                ),
                (*before, each),
            )
            for (seconds, most, *resident), before in made
            for each in samples
        ]
        made, taken = [], np.empty((0, 2 + len(at_once)))
        for takes, chosen in sorted(
            (each for each in every if max(each[0][2:]) + each[0][1] <= memory), key=_demand_of
        ):
            if not (taken <= takes).all(axis=1).any():  # none is as fast and as small
                made.append((takes, chosen))
                taken = np.vstack([taken, takes])
    return made[0][1] if made else None


def _demand_of(made: tuple[tuple[float, ...], tuple[Sample, ...]]) -> tuple[float, ...]:
    return made[0]


def _divided(
    schedule: Schedule, memory: int, stages: Sequence[int], stage_bytes: Sequence[Sample]
) -> list[MemoryBudget]:
    """Return the memory budgets of a rank's stages, with what is left of the memory at each moment."""
    most = [schedule.in_flight(stage) for stage in stages]
    limits: list[list[Limit]] = [[] for _ in stages]
    for at_once in schedule.in_flight_at_once(schedule.rank_of(stages[0])):
        own = [each.resident(number) for each, number in zip(stage_bytes, at_once, strict=True)]
        left = memory - max(each.running for each in stage_bytes) - sum(own)
        resident = [int(each + left * number / sum(most)) for each, number in zip(own, most, strict=True)]
        for place, number in enumerate(at_once):
            limits[place].append(Limit(number, memory - sum(resident) + resident[place], resident[place]))
    return [_room(own, number) for own, number in zip(limits, most, strict=True)]


def _room(limits: Sequence[Limit], in_flight: int) -> MemoryBudget:
    """Return the memory budget of a stage with at most so many micro-batches in flight."""
    full = [each for each in limits if each.in_flight == in_flight]
    fewer = tuple(each for each in limits if each.in_flight < in_flight)
    return MemoryBudget(min(each.peak for each in full), min(each.resident for each in full), fewer)


def _filled_in(samples: Sequence[Sample], in_flight: int, num_blocks: int) -> list[Sample]:
    """Return samples on the Pareto front, with mixtures of two for several blocks."""
    found: list[Sample] = []
    for each in sorted(samples, key=lambda sample: (sample.resident(in_flight), sample.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    parts = min(num_blocks, MOST_PARTS)
    shares = [part / parts for part in range(1, parts)]
    between = [
        replace(one.towards(other, share), running=max(one.running, other.running))
        for one, other in pairwise(found)
        for share in shares
    ]
    return found + between


def _seconds_within(sizes: Floats, samples: Sequence[Sample], budget: MemoryBudget, in_flight: int) -> Floats:
    """Return [first block, end block]: the seconds of a stage by the samples that fit into its memory budget."""
    finite = np.where(np.isfinite(sizes), sizes, 0.0)
    found = np.full(sizes.shape, np.inf)
    for each in samples:
        fits = np.isfinite(sizes)
        for limit in (Limit(in_flight, budget.peak, budget.resident), *budget.fewer):
            resident = finite * each.resident(limit.in_flight)
            fits &= (resident <= limit.resident) & (resident + each.running <= limit.peak)
        found = np.where(fits, np.minimum(found, finite * each.seconds), found)
    return found
