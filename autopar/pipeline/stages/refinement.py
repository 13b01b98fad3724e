"""Cuts, made better by simulation.

The formula of `cuts` does not see which stages share a rank, what a zero-bubble schedule hides, and that with few
micro-batches the slowest stage is not the pace of all. So a cut, or a run of neighbouring cuts together, is moved by
one block and stays where the simulated step is shorter, until no move helps or enough has been simulated. The result is
never worse than where it began, and need not be the best there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from autopar.pipeline.schedules.simulation import StageSeconds, simulate
from autopar.pipeline.stages.cuts import BlockCost, CutProblem

MOST_STEPS = 600_000
"""Computations of ranks that are simulated: some two seconds."""


def refined(problem: CutProblem, starts: tuple[int, ...]) -> tuple[int, ...]:
    """The first block of each stage after all moves that help."""
    left = MOST_STEPS // sum(len(order) for order in problem.schedule.orders)
    best, seconds = starts, simulated_seconds(problem, starts)
    helped = True
    while helped and left > 0:
        helped = False
        for moved in _moves(best, len(problem.blocks)):
            if left <= 0:
                break
            if is_allowed(problem, moved):
                left -= 1
                found = simulated_seconds(problem, moved)
                if found < seconds * (1 - 1e-9):
                    best, seconds, helped = moved, found, True
                    break
    return best


def simulated_seconds(problem: CutProblem, starts: Sequence[int]) -> float:
    """Seconds of a simulated step of these cuts."""
    return simulate(problem.schedule, stages_of_blocks(problem.blocks, problem.cut_seconds, starts)).seconds


def stages_of_blocks(
    blocks: Sequence[BlockCost], cut_seconds: Sequence[float], starts: Sequence[int]
) -> list[StageSeconds]:
    """What stages take that begin with these blocks; half of a transfer goes there, half comes back."""
    found = []
    for start, end in pairwise((*starts, len(blocks))):
        own = blocks[start:end]
        found.append(
            StageSeconds(
                sum(each.forward for each in own),
                sum(each.backward_input for each in own),
                sum(each.backward_weight for each in own),
                cut_seconds[end] / 2 if end < len(blocks) else 0.0,
                cut_seconds[start] / 2 if start else 0.0,
                sum(each.once for each in own),
            )
        )
    return found


def _moves(starts: tuple[int, ...], num_blocks: int) -> Iterator[tuple[int, ...]]:
    """Every run of cuts, short ones first, one block to the left and to the right."""
    for length in range(1, len(starts)):
        for first in range(1, len(starts) - length + 1):
            for step in (-1, 1):
                moved = (
                    *starts[:first],
                    *(start + step for start in starts[first : first + length]),
                    *starts[first + length :],
                )
                if all(a < b for a, b in pairwise((*moved, num_blocks))):
                    yield moved


def is_allowed(problem: CutProblem, starts: tuple[int, ...]) -> bool:
    """Whether every block that must be on a stage is there."""
    ends = (*starts[1:], len(problem.blocks))
    return all(starts[stage] <= block < ends[stage] for block, stage in problem.places)
