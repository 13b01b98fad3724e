"""How the stages of a rank share its memory.

What is held whatever is in flight (parameters, their gradients, states of the optimizer) every stage gets alike, stored
in as many parts as it can be. Of the rest a part goes to stages alike, too: weights and gradients that are held whole
save time for every micro-batch, and a stage that runs takes the same for one micro-batch as for many. The other part
goes to stages by the micro-batches that they have in flight, so that equal layers have equal room for one of them, and
are computed again alike. Where that leaves no cut, each stage of an even cut gets the least that it needs, and what is
left by the micro-batches in flight (`rooms_of_least`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from autopar.pipeline.planned_blocks import PlannedBlocks
from autopar.pipeline.schedules.schedule import Schedule
from autopar.planning.least_stored import least_stored

ALIKE = 0.4
"""Of what is left, this goes to the stages of a rank alike."""
LeastOf = Callable[[int, int, int], int]
"""(first block, end block, stage) to the least bytes that the stage takes at its fullest moment."""


def rooms_in_flight(planned: PlannedBlocks, memory: int) -> tuple[int, ...]:
    """Bytes for every stage, those of a rank together no more than the memory of a device."""
    schedule = planned.request.schedule
    fixed = least_stored(planned.whole.memory) // schedule.num_stages
    alike = max(int(ALIKE * (memory // schedule.chunks - fixed)), 0)
    return _dealt(schedule, memory, [fixed + alike] * schedule.num_stages)


def rooms_of_least(
    planned: PlannedBlocks, memory: int, starts: Sequence[int], least_of: LeastOf
) -> tuple[int, ...] | None:
    """The same for the stages of one cut, each at least what it needs; None where a rank has not so much."""
    schedule = planned.request.schedule
    ends = pairwise((*starts, len(planned.blocks)))
    least = [least_of(first, end, stage) for stage, (first, end) in enumerate(ends)]
    if any(sum(least[stage] for stage in schedule.stages_of(rank)) > memory for rank in range(schedule.num_ranks)):
        return None
    return _dealt(schedule, memory, least)


def _dealt(schedule: Schedule, memory: int, fixed: Sequence[int]) -> tuple[int, ...]:
    """Memory dealt to the stages of each rank: what is fixed, or equal parts where that is too much, and the rest."""
    rooms = [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        held = sum(map(schedule.in_flight, stages))
        left = memory - sum(fixed[stage] for stage in stages)
        for stage in stages:
            own = fixed[stage] + left * schedule.in_flight(stage) // held
            rooms[stage] = own if left >= 0 else memory // len(stages)
    return tuple(rooms)
