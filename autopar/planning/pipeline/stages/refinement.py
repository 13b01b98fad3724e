"""Cuts, made better by simulation.

The formula of `cuts` does not see which stages share a rank, what a zero-bubble schedule hides, and that with few
micro-batches the slowest stage is not the pace of all. So of all runs of neighbouring cuts the one is moved by one
block that makes the simulated step shortest, again and again until no move helps or enough has been simulated. The
result is never worse than where it began, and need not be the best there is. Under a memory limit only cuts are looked
at whose stages are known to fit, with what they take by their plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice, pairwise

import numpy as np

from autopar.planning.pipeline.schedules.simulation import StageSeconds, seconds_of_each
from autopar.planning.pipeline.stages.cheapest_cut import Floats
from autopar.planning.pipeline.stages.cuts import BlockCost, CutProblem, stages_of
from autopar.solver.deadline import NEVER, is_over

MOST_STEPS = 20_000_000
"""Computations of ranks that are simulated: some two seconds."""
AT_ONCE = 256
"""Cuts that are simulated together."""
Beyond = Callable[[int, int, int], float]
"""(stage, first block, end block) to the seconds that a stage takes beyond its blocks; infinite: it may not fit."""


def nothing(stage: int, first: int, end: int) -> float:
    """Return the estimate in which stages take the seconds of their blocks."""
    return 0.0


def refined(
    problem: CutProblem, starts: tuple[int, ...], beyond: Beyond = nothing, deadline: float = NEVER
) -> tuple[int, ...]:
    """Return the first block of each stage after all moves that help."""
    left, beyond = MOST_STEPS // sum(len(order) for order in problem.schedule.orders), cache(beyond)
    best, seconds = starts, float(simulated_seconds(problem, [starts], beyond)[0])
    while not is_over(deadline):
        allowed = (moved for moved in _moves(best, len(problem.blocks)) if is_allowed(problem, moved))
        moves = list(islice(allowed, left))
        left -= len(moves)
        if not moves:
            break
        found = simulated_seconds(problem, moves, beyond)
        place = int(found.argmin())
        if not found[place] < seconds * (1 - 1e-9):
            break
        best, seconds = moves[place], float(found[place])
    return best


def simulated_seconds(problem: CutProblem, cuts: Sequence[Sequence[int]], beyond: Beyond = nothing) -> Floats:
    """Return the seconds of a simulated step of each of some cuts; infinite where a stage may not fit.

    Seconds of stages beyond their blocks are in their backwards, as is most recomputation.
    """
    places = np.array([stages_of(starts, len(problem.blocks)) for starts in cuts])
    more = np.array([[beyond(*place) for place in each] for each in places.tolist()]).T
    fits = np.flatnonzero(np.isfinite(more).all(axis=0))
    _, first, end = places[fits].T
    more = more[:, fits]
    sent = np.array([0.0, *problem.cut_seconds[1:], 0.0]) / 2
    blocks = problem.blocks
    seconds = {
        "forward": _sums([each.forward for each in blocks], first, end),
        "backward_input": _sums([each.backward_input for each in blocks], first, end) + more,
        "backward_weight": _sums([each.backward_weight for each in blocks], first, end),
        "send_forward": sent[end],
        "send_backward": sent[first],
        "once": _sums([each.once for each in blocks], first, end),
    }
    found = np.full(len(cuts), np.inf)
    for at in range(0, len(fits), AT_ONCE):
        part = {name: each[:, at : at + AT_ONCE] for name, each in seconds.items()}
        found[fits[at : at + AT_ONCE]] = seconds_of_each(problem.schedule, part)
    return found


def _sums(of_blocks: Sequence[float], first: np.ndarray, end: np.ndarray) -> Floats:
    until = np.concatenate([[0.0], np.cumsum(of_blocks)])
    return until[end] - until[first]


def stages_of_blocks(
    blocks: Sequence[BlockCost], cut_seconds: Sequence[float], starts: Sequence[int]
) -> list[StageSeconds]:
    """Return the seconds of the stages that begin with these blocks; half of a transfer goes forward, half back."""
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
    """Yield every run of cuts, short ones first, one block to the left and to the right."""
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
    """Return whether every block that is fixed to a stage lies in that stage."""
    ends = (*starts[1:], len(problem.blocks))
    return all(starts[stage] <= block < ends[stage] for block, stage in problem.places)
