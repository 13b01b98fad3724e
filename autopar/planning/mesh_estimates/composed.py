"""A step composed of what blocks take: on one stage, or cut into the stages of a pipeline, within a memory limit.

Stages are cut so that the slowest takes least. A step takes what `planning.pipeline.stages.cuts` says of a schedule's
kind; a schedule that makes the gradients of weights apart fills a part of the bubble with them: ZB-H1 leaves
(p - 1)(F + I - W) of (p - 1)(F + I + W) on p ranks (Qi et al., ICLR 2024, section 2.3). Memory is that of every
rank with the micro-batches in flight of its stages. If the fastest plan of a rank's blocks does not fit, the smallest
share of them that makes it fit follows another plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costs.hardware.collectives import message_seconds
from autopar.costs.hardware.profile import Hardware
from autopar.errors import PipelineError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_estimates.block_use import BlockUse, Floats
from autopar.planning.pipeline.block_costs import paced
from autopar.planning.pipeline.schedules.choice import SEVERAL_STAGES
from autopar.planning.pipeline.schedules.schedule import NAMES, Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate

FILLING = {"interleaved_zero_bubble": 2.0, "zbv": 1.25, "dualpipev": 1.75}
"""Schedule → share of the bubble that is filled, relative to the share of the work that makes gradients of weights."""
MOST_SIMULATED = 2048
"""Stages times stages of a rank times micro-batches of a schedule that is simulated: PyTorch takes seconds to lay out
larger ones."""
MOST_CHUNKS = 12
"""Most stages of a rank by default: for more, PyTorch takes minutes to lay a schedule out."""
SIMULATED = 4
"""Schedules of a candidate, the best by the formula, that are simulated."""
SIMPLER = 5e-3
"""Relative to the step: of schedules that differ by less, that of the fewest stages is taken."""
TIMES = ("forward", "backward", "weights", "once", "reductions", "slowing")
ROOM = 0.97
"""Share of the memory limit within which stages are composed.

The rest is a margin: the search cuts only between blocks, and the other stages of a rank keep their memory.
"""


@dataclass(frozen=True, slots=True)
class Composed:
    """An estimate of a step: its seconds, and the bytes of tensors of the fullest device."""

    seconds: float
    num_bytes: float
    schedule: Schedule | None = None
    uses: tuple[BlockUse, ...] = ()
    """Plans of the blocks, of which it is mixed; of one piece only those with a share."""
    shares: tuple[float, ...] = ()
    """Shares of these plans in the blocks of one piece."""
    stages: tuple[StageSeconds, ...] = ()

    def simulated(self) -> Composed:
        """Return the estimate with the seconds of its simulated schedule, unless that has too many computations."""
        schedule = self.schedule
        if schedule is None or schedule.num_stages * schedule.chunks * schedule.num_microbatches > MOST_SIMULATED:
            return self
        return replace(self, seconds=simulate(schedule, self.stages).seconds)


class InOnePiece:
    """Steps of `count` micro-batches on one stage, by one plan of its blocks or mixed of two."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.uses: list[BlockUse] = []
        self.points: list[tuple[float, float]] = []
        """Plan → seconds of a step, and bytes."""

    def alone(self, use: BlockUse) -> float:
        """Return the seconds of a step by one plan."""
        return use.step_seconds + (self.count - 1) * use.microbatch_seconds

    def add(self, use: BlockUse) -> None:
        """Take a further plan into account."""
        self.uses.append(use)
        self.points.append((self.alone(use), float(use.stages([0]).peak(np.ones(1))[0])))

    def best(self, limit: float) -> Composed | None:
        """Return the fastest step within a limit; None if there is none."""
        points = np.array(self.points)
        weights = mixed(points[:, :1], points[:, 1:], limit, [len(self.uses[0].forward)])
        if weights is None:
            return None
        seconds, num_bytes = map(float, weights[0] @ points)
        taken = [number for number in np.argsort(points[:, 1]) if weights[0, number]]
        uses, shares = tuple(self.uses[each] for each in taken), tuple(float(weights[0, each]) for each in taken)
        return Composed(seconds, num_bytes, uses=uses, shares=shares)


class InStages:
    """Steps of a pipeline's schedules, by one plan of its blocks or mixed of two on each rank.

    Args:
        schedules: Schedules to compare.
        mesh, axis, hardware: Mesh axis and devices that messages between stages cross.
    """

    def __init__(self, schedules: Iterable[Schedule], mesh: Mesh, axis: str, hardware: Hardware) -> None:
        self.mesh, self.axis, self.hardware = mesh, axis, hardware
        self.schedules = [Staged.of(each) for each in schedules]
        self.uses: list[BlockUse] = []
        self._cuts: dict[int, NDArray[np.intp]] = {}
        """Number of stages → the first block of each."""

    def alone(self, use: BlockUse) -> float:
        """Return the seconds of the fastest schedule by one plan, as formulas have it."""
        every = (each.of_plans([each.part(use, *self._cut(each, use), counted=False)]) for each in self.schedules)
        return min((each.seconds for each in every if each is not None), default=math.inf)

    def add(self, use: BlockUse) -> None:
        """Take a further plan into account."""
        self.uses.append(use)
        for each in self.schedules:
            each.parts.append(each.part(use, *self._cut(each, use)))

    def best(self, limit: float) -> Composed | None:
        """Return the simplest of the fastest steps within a limit; None if no schedule has room on every rank."""
        every = [each.of_plans(each.parts, ROOM * limit) for each in self.schedules]
        found = sorted((each for each in every if each is not None), key=lambda each: each.seconds)
        found = [replace(each.simulated(), uses=tuple(self.uses)) for each in found[:SIMULATED]]
        least = min((each.seconds for each in found), default=math.inf)
        return min((each for each in found if each.seconds <= (1 + SIMPLER) * least), key=_complexity, default=None)

    def _cut(self, staged: Staged, use: BlockUse) -> tuple[NDArray[np.intp], Floats]:
        """Return the first block of every stage, which is that of the first plan, and the seconds of its message."""
        number = staged.schedule.num_stages
        if number not in self._cuts:
            self._cuts[number] = np.array(even_cuts(use.busy, number), dtype=np.intp)
        starts = self._cuts[number]
        sizes = [math.ceil(use.sent[first]) for first in starts[1:]]
        each = {size: message_seconds(size, self.mesh, self.axis, self.hardware) for size in {*sizes} if size}
        return starts, np.array([0.0, *(each.get(size, 0.0) for size in sizes)])


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds and bytes of a schedule's stages by one plan, arrays of one entry for each; bytes for each rank."""

    forward: Floats
    backward: Floats
    weights: Floats
    """Seconds of a backward in which calls compute gradients of weights."""
    once: Floats
    reductions: Floats
    slowing: Floats
    """Seconds by which reductions lengthen the last backward."""
    sending: Floats
    """Seconds of the message from the previous stage."""
    num_bytes: Floats
    num_blocks: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Staged:
    """A schedule with what plans make of its stages."""

    schedule: Schedule
    ranks: NDArray[np.intp]
    """[rank, stage of the rank]."""
    in_flight: Floats
    """Micro-batches of every stage at the fullest of its rank."""
    parts: list[Part]

    @classmethod
    def of(cls, schedule: Schedule) -> Staged:
        """Return the schedule, without a plan."""
        ranks = np.array([schedule.stages_of(rank) for rank in range(schedule.num_ranks)], dtype=np.intp)
        flying = np.zeros(schedule.num_stages)
        for rank, stages in enumerate(ranks):
            flying[stages] = in_flight(schedule, rank)
        return cls(schedule, ranks, flying, [])

    def part(self, use: BlockUse, starts: NDArray[np.intp], sending: Floats, counted: bool = True) -> Part:
        """Return what a plan makes of the stages that begin with these blocks; no bytes unless they are `counted`."""
        slow = "slowing_weights" if self.schedule.halves_backwards else "slowing"
        forward, backward, weights, once, reductions, slowing = (
            np.add.reduceat(getattr(use, name), starts) for name in (*TIMES[:-1], slow)
        )
        sizes = np.diff(starts, append=len(use.forward))
        forward += use.entering[starts]
        backward += use.turning[starts + sizes - 1] + use.leaving[starts]
        forward, backward = paced(forward, backward, np.add.reduceat(use.launching, starts, axis=1))
        num_bytes = self._rank_bytes(use, starts) if counted else np.zeros(len(self.ranks))
        return Part(forward, backward, weights, once, reductions, slowing, sending, num_bytes, sizes)

    def _rank_bytes(self, use: BlockUse, starts: NDArray[np.intp]) -> Floats:
        """Return the bytes of the fullest device of every rank: one stage at its peak, others keep what they hold."""
        stage_bytes = use.stages(starts)
        resident, peak = stage_bytes.resident(self.in_flight), stage_bytes.peak(self.in_flight)
        received = use.sent[starts] * (self.in_flight + 1)
        received[0] = 0.0
        return (resident + received)[self.ranks].sum(axis=1) + (peak - resident)[self.ranks].max(axis=1)

    def of_plans(self, parts: Sequence[Part], limit: float = math.inf) -> Composed | None:
        """Return the step of plans within a limit; None if a rank has no room for any."""
        forward, backward, *_ = times = [np.array([getattr(each, name) for each in parts]) for name in TIMES]
        by_rank = (forward + backward)[:, self.ranks].sum(axis=2)
        num_bytes = np.array([each.num_bytes for each in parts])
        sizes = parts[0].num_blocks[self.ranks].sum(axis=1)
        weights = mixed(by_rank, num_bytes, limit, sizes)
        if weights is None:
            return None
        shares = np.empty((self.schedule.num_stages, len(parts)))
        shares[self.ranks] = weights[:, np.newaxis]
        there, back, of_weights, latest, reductions, slowing = (np.einsum("so,os->s", shares, array) for array in times)
        sending = parts[0].sending
        blocks = parts[0].num_blocks
        overlapped = of_weights if self.schedule.halves_backwards else back
        # The reductions of the block that ends last overlap nothing but what waits for them.
        behind = reductions - np.minimum(reductions, overlapped * (1 - 1 / blocks) + slowing)
        ending = latest[self.ranks].sum(axis=1) + self._reducing(reductions, behind, back)
        slowed = slowing[self.ranks].sum(axis=1).max() if self.schedule.halves_backwards else slowing.sum()
        filled = FILLING.get(self.schedule.name, 0.0) * of_weights.sum() / (there + back).sum()
        total = _step(self.schedule, there + back, 2 * sending, filled) + slowed + ending.max()
        timed = tuple(
            StageSeconds(
                *map(float, (f, b - w, w, sent, received, o, slow)), reducing=float(left), reductions=float(each)
            )
            for f, b, w, sent, received, o, slow, left, each in zip(
                *(there, back, of_weights, [*sending[1:], 0.0], sending, latest, slowing, behind, reductions),
                strict=True,
            )
        )
        num_saved = float((weights * num_bytes.T).sum(axis=1).max())
        return Composed(float(total), num_saved, self.schedule, stages=timed)

    def _reducing(self, reductions: Floats, behind: Floats, backward: Floats) -> Floats:
        """Return the seconds for which the reductions of each rank run on behind its last backward.

        These are those of its first stage; others overlap with the backwards of the stages before them.
        """
        others = reductions[self.ranks].sum(axis=1) - backward[self.ranks[:, :-1]].sum(axis=1)
        return np.maximum(behind[self.ranks[:, 0]], others) if self.ranks.shape[1] > 1 else behind[self.ranks[:, 0]]


def _step(schedule: Schedule, seconds: Floats, sending: Floats, filled: float) -> float:
    """Return the seconds of a step of stages, by the formula of its kind: `planning.pipeline.stages.cuts`.

    Gradients of weights fill a share of the bubble.
    """
    count, chunks, ranks = schedule.num_microbatches, schedule.chunks, schedule.num_ranks
    paces = seconds.reshape(chunks, ranks).max(axis=1).sum()
    if chunks == 1:
        bubble, work = seconds.sum() - seconds.max(), count * seconds.max()
    elif count >= ranks:
        work = count * paces
        bubble = max(ranks * (seconds**2).sum() / seconds.sum() - paces / chunks, 0.0)
    else:
        work, bubble = seconds.sum(), (count - 1) / chunks * paces
    # Transfers overlap with other ranks' compute, except for the first micro-batch and the last.
    return float(work + max(1 - filled, 0.0) * bubble + sending.sum())


def mixed(seconds: Floats, num_bytes: Floats, limit: float, sizes: Sequence[int]) -> Floats | None:
    """Return for every column the shares [column, plan] of the fastest mixture of two plans within a limit.

    `seconds` and `num_bytes` are [plan, column], and `sizes` the blocks of a column, which are of one plan or the other
    each. None if no plan of some column is within the limit.
    """
    found = np.zeros(seconds.T.shape)
    for column, (taken, stage_bytes) in enumerate(zip(seconds.T, num_bytes.T, strict=True)):
        fits = np.flatnonzero(stage_bytes <= limit)
        if not len(fits):
            return None
        best = int(fits[np.argmin(taken[fits])])
        least, shares = taken[best], {best: 1.0}
        for a in fits:
            for b in np.flatnonzero((stage_bytes > limit) & (taken < taken[a])):
                share = (
                    math.floor((limit - stage_bytes[a]) / (stage_bytes[b] - stage_bytes[a]) * sizes[column])
                    / sizes[column]
                )
                if (own := (1 - share) * taken[a] + share * taken[b]) < least:
                    least, shares = own, {int(a): 1 - share, int(b): share}
        for plan, share in shares.items():
            found[column, plan] = share
    return found


def even_cuts(seconds: Floats, num_stages: int) -> tuple[int, ...]:
    """Return the first block of every stage of a cut whose slowest stage takes least.

    `seconds` are those of what works in parallel, [worker, block]: a stage takes as long as the busiest.
    """
    count = seconds.shape[1]
    until = np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)

    def cut(most: float) -> list[int] | None:
        starts = [0]
        for stage in range(1, num_stages + 1):
            left, begun = num_stages - stage, until[:, starts[-1]]
            ends = (
                int(np.searchsorted(own, first + most * (1 + 1e-9), side="right")) - 1
                for own, first in zip(until, begun, strict=True)
            )
            end = min(max(min(ends), starts[-1] + 1), count - left)
            if (until[:, end] - begun).max() > most * (1 + 1e-6):
                return None
            if stage == num_stages:
                return starts if end == count else None
            starts.append(end)
        return None

    high = float(until[:, -1].max())
    low = max(float(seconds.max()), high / num_stages)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle) is not None else (middle, high)
    found = cut(high)
    assert found is not None, "all blocks on one stage take no more than all"
    return tuple(found)


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


def _complexity(composed: Composed) -> tuple[int, int, float]:
    schedule = composed.schedule
    assert schedule is not None, "composed of stages"
    return schedule.chunks, NAMES.index(schedule.name), composed.seconds
