"""A step composed of what blocks take: on one stage, or cut into the stages of a pipeline, within a memory limit.

Stages are cut so that the slowest takes least. A step takes what `pipeline.stages.cuts` says of a schedule's kind; a
schedule that makes the gradients of weights apart fills a part of the bubble with them. Memory is that of every rank
with the micro-batches in flight of its stages. Where a rank has no room for the fastest plan of its blocks, a share of
its blocks, as small as fits, is as in another plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.arranging.block_use import BlockUse, Floats
from autopar.errors import PipelineError
from autopar.hardware.collectives import message_seconds
from autopar.hardware.profile import Hardware
from autopar.pipeline.schedules.choice import SEVERAL_STAGES
from autopar.pipeline.schedules.schedule import Schedule
from autopar.pipeline.schedules.simulation import StageSeconds, simulate
from autopar.sharding.mesh import Mesh

FILLED = {"interleaved_zero_bubble": 1 / 3, "zbv": 1 / 2, "dualpipev": 1 / 2}
"""Schedule → the share of the bubble that is left where gradients of weights fill it, of equal thirds of the work."""


MOST_SIMULATED = 2048
"""Stages times stages of a rank times micro-batches of a schedule that is simulated: PyTorch takes seconds to lay out
larger ones."""
MOST_CHUNKS = 12
"""Stages of a rank, where none are said: for more PyTorch takes minutes to lay a schedule out."""
ROOM = 0.92
"""Of the limit, that stages are composed within: the search cuts between blocks, and others of a rank keep theirs."""


@dataclass(frozen=True, slots=True)
class Composed:
    """An estimate of a step: its seconds, and the bytes of tensors of the fullest device."""

    seconds: float
    num_bytes: float
    schedule: Schedule | None = None
    uses: tuple[BlockUse, ...] = ()
    """Plans of the blocks of its stages, of which it is mixed."""
    stages: tuple[StageSeconds, ...] = ()

    def simulated(self) -> Composed:
        """Return the estimate with the seconds of its simulated schedule, unless that has too many computations."""
        schedule = self.schedule
        if schedule is None or schedule.num_stages * schedule.chunks * schedule.num_microbatches > MOST_SIMULATED:
            return self
        return replace(self, seconds=simulate(schedule, self.stages).seconds)


def in_one_piece(uses: Sequence[BlockUse], count: int, limit: float) -> Composed | None:
    """Return the fastest step of `count` micro-batches on one stage within a limit, mixed of two plans at most."""
    end = len(uses[0].forward)
    points = np.array(
        [(each.step_seconds + (count - 1) * each.microbatch_seconds, each.peak_bytes(0, end, 1)) for each in uses]
    )
    found = mixed(points[:, :1], points[:, 1:], limit, [end])
    if found is None:
        return None
    weights = found[0]
    return Composed(float(weights @ points[:, 0]), float(weights @ points[:, 1]))


def in_stages(
    uses: Sequence[BlockUse], schedule: Schedule, mesh: Mesh, axis: str, hardware: Hardware, limit: float
) -> Composed | None:
    """Return the step of a schedule within a limit; None if a rank has no room for any plan of its blocks."""
    fastest = min(uses, key=lambda each: each.microbatch_seconds)
    starts = even_cuts(fastest.forward + fastest.backward, schedule.num_stages)
    spans = list(pairwise((*starts, len(fastest.forward))))
    ranks = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    forward, backward, once = (
        np.array([[array[a:b].sum() for a, b in spans] for array in arrays])
        for arrays in ([u.forward for u in uses], [u.backward for u in uses], [u.once for u in uses])
    )
    each = forward + backward
    num_bytes = np.array([_rank_bytes(use, schedule, spans, ranks) for use in uses])
    by_rank = np.array([[own[list(stages)].sum() for stages in ranks] for own in each])
    sizes = [sum(spans[stage][1] - spans[stage][0] for stage in stages) for stages in ranks]
    weights = mixed(by_rank, num_bytes, ROOM * limit, sizes)
    if weights is None:
        return None
    shares = weights[[schedule.rank_of(stage) for stage in range(schedule.num_stages)]]
    there, back, latest = (np.einsum("so,os->s", shares, array) for array in (forward, backward, once))
    sending = np.array([0.0, *(_sending(fastest, first, mesh, axis, hardware) for first, _ in spans[1:])])
    ends = max(sum(latest[stage] for stage in stages) for stages in ranks)
    total = _step(schedule, there + back, 2 * sending) + ends
    timed = tuple(
        StageSeconds(*map(float, (f, b / 2, b / 2, sent, received, o)))
        for f, b, sent, received, o in zip(there, back, [*sending[1:], 0.0], sending, latest, strict=True)
    )
    num_kept = float((weights * num_bytes.T).sum(axis=1).max())
    return Composed(float(total), num_kept, schedule, tuple(uses), timed)


def _step(schedule: Schedule, seconds: Floats, sending: Floats) -> float:
    """Return the seconds of a step of stages, by the formula of the schedule's kind (`pipeline.stages.cuts`)."""
    count, chunks, ranks = schedule.num_microbatches, schedule.chunks, schedule.num_ranks
    paces = seconds.reshape(chunks, ranks).max(axis=1).sum()
    if chunks == 1:
        bubble, work = seconds.sum() - seconds.max(), count * seconds.max()
    elif count >= ranks:
        work = count * paces
        bubble = max(ranks * (seconds**2).sum() / seconds.sum() - paces / chunks, 0.0)
    else:
        work, bubble = seconds.sum(), (count - 1) / chunks * paces
    # What a rank sends arrives beside what others compute, but for the first micro-batch and the last.
    return float(work + FILLED.get(schedule.name, 1.0) * bubble + sending.sum())


def mixed(seconds: Floats, num_bytes: Floats, limit: float, sizes: Sequence[int]) -> Floats | None:
    """Return for every column the shares [column, plan] of the fastest mixture of two plans within a limit.

    `seconds` and `num_bytes` are [plan, column], and `sizes` the blocks of a column, which are of one plan or the other
    each. None if no plan of some column is within the limit.
    """
    found = np.zeros(seconds.T.shape)
    for column, (taken, held) in enumerate(zip(seconds.T, num_bytes.T, strict=True)):
        fits = np.flatnonzero(held <= limit)
        if not len(fits):
            return None
        best = int(fits[np.argmin(taken[fits])])
        least, shares = taken[best], {best: 1.0}
        for a in fits:
            for b in np.flatnonzero((held > limit) & (taken < taken[a])):
                share = math.floor((limit - held[a]) / (held[b] - held[a]) * sizes[column]) / sizes[column]
                if (own := (1 - share) * taken[a] + share * taken[b]) < least:
                    least, shares = own, {int(a): 1 - share, int(b): share}
        for plan, share in shares.items():
            found[column, plan] = share
    return found


def even_cuts(seconds: Floats, num_stages: int) -> tuple[int, ...]:
    """Return the first block of every stage of a cut whose slowest stage takes least."""
    count = len(seconds)
    until = np.concatenate([[0.0], np.cumsum(seconds)])

    def cut(most: float) -> list[int] | None:
        starts = [0]
        for stage in range(1, num_stages + 1):
            left = num_stages - stage
            end = int(np.searchsorted(until, until[starts[-1]] + most * (1 + 1e-9), side="right")) - 1
            end = min(max(end, starts[-1] + 1), count - left)
            if until[end] - until[starts[-1]] > most * (1 + 1e-6):
                return None
            if stage == num_stages:
                return starts if end == count else None
            starts.append(end)
        return None

    low, high = max(float(seconds.max()), float(until[-1]) / num_stages), float(until[-1])
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle) is not None else (middle, high)
    found = cut(high)
    assert found is not None, "all blocks on one stage take no more than all"
    return tuple(found)


def _rank_bytes(
    use: BlockUse, schedule: Schedule, spans: Sequence[tuple[int, int]], ranks: Sequence[Sequence[int]]
) -> list[float]:
    """Return the bytes of the fullest device of every rank: one stage at its peak, others keep what they hold."""
    found = []
    for rank, stages in enumerate(ranks):
        flight = dict(zip(stages, in_flight(schedule, rank), strict=True))
        peaks, kept = [], []
        for stage in stages:
            (first, end), number = spans[stage], flight[stage]
            received = use.sent[first] * (number + 1) if stage else 0.0
            kept.append(received + use.kept_bytes(first, end, number))
            peaks.append(received + use.peak_bytes(first, end, number))
        found.append(sum(kept) + max(peak - own for peak, own in zip(peaks, kept, strict=True)))
    return found


def in_flight(schedule: Schedule, rank: int) -> list[int]:
    """Return the micro-batches in flight on the stages of a rank at its fullest, by the schedule's kind."""
    count, ranks, chunks = schedule.num_microbatches, schedule.num_ranks, schedule.chunks
    if schedule.name == "gpipe":
        return [count] * chunks
    if chunks == 1:
        return [min(count, ranks - rank)]
    if schedule.is_v:
        return [min(count, 2 * ranks - 1 - rank), min(count, rank + 1)]
    each = count // max(1, count // ranks)
    if schedule.halves_backwards:  # gradients of weights wait for a gap, on all ranks alike
        return [each] * chunks
    left = min(count * chunks, (chunks - 1) * each + 2 * (ranks - 1 - rank) + 1)
    cycles, rest = divmod(left, chunks * each)
    return [cycles * each + min(max(rest - chunk * each, 0), each) for chunk in range(chunks)]


def schedules_of(
    names: Sequence[str], num_ranks: int, count: int, num_blocks: int, chunks: int | None
) -> Iterator[Schedule]:
    """Yield the schedules that may run: of some names, with as many stages on a rank as there are blocks for.

    Where that is left open, stages are of 1, 2, 3, 4, 6, 8, 12 … blocks.
    """
    sizes = [size for power in range(num_blocks.bit_length()) for size in (2**power, 3 * 2**power)]
    found = (num_blocks // (num_ranks * size) for size in sizes)
    several = sorted({each for each in found if 2 <= each <= MOST_CHUNKS} | {2})
    for name in names:
        offered = [chunks] if chunks else several if name in SEVERAL_STAGES else [1]
        for each in offered:
            try:
                schedule = Schedule(name, num_ranks, count, each)
            except PipelineError:
                continue
            if schedule.num_stages <= num_blocks:
                yield schedule


def _sending(use: BlockUse, block: int, mesh: Mesh, axis: str, hardware: Hardware) -> float:
    """Return the seconds of the message to the stage that begins with a block."""
    num_bytes = math.ceil(use.sent[block])
    return message_seconds(num_bytes, mesh, axis, hardware) if num_bytes else 0.0
