"""How the stages of a rank share its memory.

They take turns: while one runs, the others keep what lasts (parameters, gradients, states of the optimizer) and what
waits for a backward. So they fit where, for each of them,

    peak(stage) + sum over the others of kept(other)  <=  memory

A stage of middling size is planned within some memory limits: its samples say what memory is worth. Less memory takes
longer, more micro-batches in flight take more memory, and longer stages take as much more of both. Each rank takes the
samples, one for each of its stages, that take the least seconds together of those that fit (`fastest`, a
multiple-choice knapsack), which gives memory to the stage that gains the most by it. Within these rooms the best cut is
found by the seconds of samples, for the search to begin with (`thought_in_rooms`).

What the samples leave goes to stages by their micro-batches in flight. Where no samples fit, stages share by these
alone, and where that leaves no cut, each stage of an even cut gets the least that it needs (`rooms_of_least`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.pipeline.schedules.schedule import Schedule
from autopar.pipeline.stages.cheapest_cut import Floats
from autopar.pipeline.stages.cuts import CutProblem, own_seconds, transfers
from autopar.pipeline.stages.held import Held, Room

BETWEEN = (0.25, 0.5, 0.75)
"""Of the way from one sample to the next: a stage of several layers may be planned like that."""
LeastOf = Callable[[int, int, int], int]
"""(first block, end block, stage) to the least bytes that the stage takes at its fullest moment."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one micro-batch, and what is held by choices that take them."""

    seconds: float
    kept: float
    """Bytes while others run."""
    running: float
    """Bytes beside that at the fullest moment."""

    @classmethod
    def of(cls, seconds: float, held: Held) -> Sample:
        return cls(seconds, held.kept, held.peak - held.kept)

    def scaled(self, size: float) -> Sample:
        """Of a stage of so many times the blocks, which run one after the other."""
        return Sample(size * self.seconds, size * self.kept, self.running)

    def towards(self, other: Sample, share: float) -> Sample:
        """So much of the way to another."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Sample(*((1 - share) * one + share * each for one, each in pairs))


SamplesOf = Callable[[int], Sequence[Sample]]
"""Stage → its samples, for a stage of the size that was sampled."""


def thought_in_rooms(
    problem: CutProblem, memory: int, samples: SamplesOf, sampled: float
) -> tuple[Floats, tuple[Room, ...]]:
    """Rooms, and what stages are thought to take in them, by samples of a stage of so many seconds.

    That is [stage, first block, end block], with transfers; infinite where nothing fits.
    """
    schedule, own = problem.schedule, own_seconds(problem)
    every = [_filled_in(samples(stage)) for stage in range(schedule.num_stages)]
    size = sum(problem.own_seconds) / schedule.num_stages / sampled
    rooms = shared_rooms(schedule, memory, lambda stage: [each.scaled(size) for each in every[stage]])
    table = np.stack([_within(*each) for each in zip(own / sampled, every, rooms, strict=True)])
    return np.maximum(table, own) + transfers(problem), rooms


def shared_rooms(schedule: Schedule, memory: int, samples: SamplesOf) -> tuple[Room, ...]:
    """The rooms of all stages, given the samples of each; those of a rank fit together."""
    found = [Room(0, 0)] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        chosen = fastest([samples(stage) for stage in stages], memory) or [Sample(0.0, 0, 0)] * len(stages)
        for stage, room in zip(stages, _dealt(schedule, memory, stages, chosen), strict=True):
            found[stage] = room
    return tuple(found)


def rooms_of_least(
    schedule: Schedule, memory: int, starts: Sequence[int], num_blocks: int, least_of: LeastOf
) -> tuple[Room, ...] | None:
    """The same for the stages of one cut, each with room for its least peak, as if all of a rank were at it at once.

    None where a rank has not so much.
    """
    ends = pairwise((*starts, num_blocks))
    least = [least_of(first, end, stage) for stage, (first, end) in enumerate(ends)]
    ranks = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    if any(sum(least[stage] for stage in stages) > memory for stages in ranks):
        return None
    return shared_rooms(schedule, memory, lambda stage: [Sample(0.0, least[stage], 0.0)])


def fastest(options: Sequence[Sequence[Sample]], memory: int) -> tuple[Sample, ...] | None:
    """A sample for each stage of a rank, of the least seconds in all that fit together; None where none do."""
    made: list[tuple[float, float, float, tuple[Sample, ...]]] = [(0.0, 0.0, 0.0, ())]
    for samples in options:
        every = [
            (seconds + each.seconds, kept + each.kept, max(most, each.running), (*before, each))
            for seconds, kept, most, before in made
            for each in samples
        ]
        made = []
        for one in sorted((each for each in every if each[1] + each[2] <= memory), key=lambda each: each[:3]):
            if all(one[1] < other[1] or one[2] < other[2] for other in made):  # none is as fast and as small
                made.append(one)
    return made[0][3] if made else None


def _dealt(schedule: Schedule, memory: int, stages: Sequence[int], held: Sequence[Sample]) -> list[Room]:
    """The rooms of a rank's stages that hold so much, with what is left of the memory."""
    left = memory - max(each.running for each in held) - sum(each.kept for each in held)
    in_flight = [schedule.in_flight(stage) for stage in stages]
    kept = [int(each.kept + left * own / sum(in_flight)) for each, own in zip(held, in_flight, strict=True)]
    return [Room(memory - sum(kept) + own, own) for own in kept]


def _filled_in(samples: Sequence[Sample]) -> list[Sample]:
    """Samples, of which none is slower and keeps more than another, with some between them."""
    found: list[Sample] = []
    for each in sorted(samples, key=lambda sample: (sample.kept, sample.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    between = [
        replace(one.towards(other, share), running=max(one.running, other.running))
        for one, other in pairwise(found)
        for share in BETWEEN
    ]
    return found + between


def _within(sizes: Floats, samples: Sequence[Sample], room: Room) -> Floats:
    """[first block, end block]: the seconds of a stage by the samples that fit into its room."""
    finite = np.where(np.isfinite(sizes), sizes, 0.0)
    found = np.full(sizes.shape, np.inf)
    for each in samples:
        kept = finite * each.kept
        fits = np.isfinite(sizes) & (kept <= room.kept) & (kept + each.running <= room.peak)
        found = np.where(fits, np.minimum(found, finite * each.seconds), found)
    return found
