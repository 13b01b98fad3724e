"""Cuts of a model into pipeline stages: least time of a step, by a formula for each kind of schedule.

With t(s) the seconds of stage s for one micro-batch, m micro-batches, p ranks and v stages per rank (chunks), a step
takes

    sum(t) + (m - 1) * max(t)                                            v = 1
    p * sum(t^2) / T + (m - 1/v) * sum over passes of (max of t)         v > 1 and m >= p
    sum(t) + (m - 1) / v * sum over passes of (max of t)                 v > 1 and m < p

where a pass is p stages one after the other, one on every rank, and T the sum of t with no transfers. The first line is
equation 2 of Alpa (Zheng et al., OSDI 2022) and the time of GPipe and PipeDream-Flush: all stages fill, then the
slowest sets the pace. The others extend it. Equal stages take (m v + p - 1) t by them, the time of interleaved 1F1B
(Narayanan et al., SC 2021). With few micro-batches they give the chain of the first one. Each pass has the pace of its
slowest stage, which is never less than the work of the busiest rank. The pipeline fills with p stages of mean length,
the mean weighted by length: long passes between short ones stall. (The busiest rank alone would allow any split of a
rank's work between its passes; such cuts are slower in simulation.) The work that zero-bubble schedules hide in the
bubble is left to the simulation of the schedule.

t(s) holds forward, backward, the work of a stage once per step divided by m, and half of the transfer at each of its
cuts: in the steady state of 1F1B, a rank waits for a transfer for about half of the way there and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autopar.errors import PipelineError
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds
from autopar.planning.pipeline.stages.cheapest_cut import Floats, Integers, cheapest_cut

Place = tuple[int, int, int]
"""Stage, first block and end block."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds of one block: of one micro-batch, and `once` per step; `name` is for messages."""

    forward: float
    backward_input: float
    backward_weight: float
    once: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        assert min(self.forward, self.backward_input, self.backward_weight, self.once) >= 0, f"negative: {self}"


@dataclass(frozen=True, slots=True)
class CutProblem:
    """Blocks to be cut into the stages of `schedule`.

    `cut_seconds[i]` is the transfer of one micro-batch there and back if block i begins a stage (that of block 0 is not
    read). `pins` says of blocks which stage they are in.

    Raises:
        PipelineError: More stages than blocks, or pins that no cut follows.
    """

    blocks: tuple[BlockCost, ...]
    cut_seconds: tuple[float, ...]
    schedule: Schedule
    pins: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.cut_seconds) == len(self.blocks), "one transfer for every block"
        if self.schedule.num_stages > len(self.blocks):
            raise PipelineError(
                f"{self.schedule.num_stages} stages ({self.schedule.num_ranks} ranks with {self.schedule.chunks} "
                f"each) were requested for a model of {len(self.blocks)} blocks; a stage needs one block at least. Use "
                "a shorter pipeline axis, or Pipeline(stages_per_rank=…) with fewer."
            )
        self._check_pins()

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Blocks and the stages they must be in: both ends of the model, and the user's pins."""
        return tuple(sorted({(0, 0), (len(self.blocks) - 1, self.schedule.num_stages - 1), *self.pins.items()}))

    @property
    def own_seconds(self) -> list[float]:
        """Seconds of each block for one micro-batch, with its share of what is done once."""
        return [
            each.forward + each.backward_input + each.backward_weight + each.once / self.schedule.num_microbatches
            for each in self.blocks
        ]

    @property
    def pace(self) -> float:
        """Factor in a step's seconds on the slowest stage of each pass."""
        num_microbatches, chunks = self.schedule.num_microbatches, self.schedule.chunks
        filled = num_microbatches >= self.schedule.num_ranks
        return num_microbatches - 1 / chunks if filled else (num_microbatches - 1) / chunks

    def fill(self, seconds: Floats) -> Floats:
        """Return the seconds that a step takes once to fill, for stages of so many seconds each."""
        if self.schedule.chunks == 1 or self.schedule.num_microbatches < self.schedule.num_ranks:
            return seconds
        total = sum(self.own_seconds)
        return self.schedule.num_ranks / total * seconds**2 if total > 0 else seconds

    def seconds_of(self, stage_seconds: Sequence[float]) -> float:
        """Return the seconds of a step whose stages take `stage_seconds` for one micro-batch."""
        if np.isinf(stage_seconds).any():
            return np.inf
        seconds = np.array(stage_seconds)
        paces = seconds.reshape(-1, self.schedule.num_ranks).max(axis=1)
        return float(self.fill(seconds).sum() + self.pace * paces.sum())

    def name_of(self, block: int) -> str:
        """Return a block as messages call it."""
        name = self.blocks[block].name
        return f"block {block} ({name})" if name else f"block {block}"

    def _check_pins(self) -> None:
        for block, stage in self.pins.items():
            assert 0 <= block < len(self.blocks), f"no block {block}"
            if not 0 <= stage < self.schedule.num_stages:
                raise PipelineError(
                    f"{self.name_of(block)} is pinned to stage {stage}; there are {self.schedule.num_stages} stages. "
                    f"Use a stage from 0 to {self.schedule.num_stages - 1}."
                )
        for (block, stage), (after, later) in pairwise(self.places):
            if not 0 <= later - stage <= after - block:
                reason = (
                    f"{later - stage} cuts do not fit between them"
                    if later > stage
                    else "stages follow the model's order"
                )
                raise PipelineError(
                    f"{self.name_of(block)} was to be in stage {stage} and {self.name_of(after)} in stage {later}, but "
                    f"{reason}. The first block is in stage 0 and the last in stage {self.schedule.num_stages - 1}; "
                    "pin blocks so that every stage has one."
                )


@dataclass(frozen=True, slots=True)
class Cuts:
    """The first block of each stage, what the stages and the step take, and seconds that no cut can be below."""

    starts: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    seconds: float
    bound: float


def best_cuts(problem: CutProblem) -> Cuts:
    """Return the cut of least seconds, by the sums of its blocks."""
    table = least_seconds(problem)
    starts = cheapest_cut(problem.fill(table), table, problem.schedule.num_ranks, problem.pace)
    assert starts is not None, "blocks have finite seconds, and a cut that follows the pins there is"
    return cuts_of(problem, table, starts)


def cuts_of(problem: CutProblem, table: Floats, starts: tuple[int, ...]) -> Cuts:
    """Return a cut with the costs of a table."""
    own = tuple(float(table[stage]) for stage in stages_of(starts, len(problem.blocks)))
    seconds = problem.seconds_of(own)
    return Cuts(starts, own, seconds, seconds)


def step_seconds(problem: CutProblem, starts: Sequence[int], stages: Sequence[StageSeconds]) -> float:
    """Return the seconds of a step of a cut, by the formula, whose stages take these, each for a micro-batch."""
    sent, count = transfers(problem), problem.schedule.num_microbatches
    own = [each.forward + each.backward_input + each.backward_weight + each.once / count for each in stages]
    places = stages_of(starts, len(problem.blocks))
    return problem.seconds_of([each + float(sent[place]) for each, place in zip(own, places, strict=True)])


def stages_of(starts: Sequence[int], num_blocks: int) -> list[Place]:
    """Stage, first block and end block of each stage of a cut."""
    return [(stage, first, end) for stage, (first, end) in enumerate(pairwise((*starts, num_blocks)))]


def least_seconds(problem: CutProblem) -> Floats:
    """Return [stage, first block, end block]: a lower bound on the seconds of blocks and transfers."""
    return own_seconds(problem) + transfers(problem)


def own_seconds(problem: CutProblem) -> Floats:
    """Return [stage, first block, end block]: seconds of the blocks for one micro-batch, infinite if pins forbid it."""
    num_blocks = len(problem.blocks)
    until = np.concatenate([[0.0], np.cumsum(problem.own_seconds)])
    positions = np.arange(num_blocks + 1)
    firsts, ends = positions[:, None], positions[None, :]
    sums = np.where(firsts < ends, until[None, :] - until[:, None], np.inf)
    first_from, first_to, end_from, end_to = (each[:, None, None] for each in _spans(problem))
    allowed = (firsts >= first_from) & (firsts <= first_to) & (ends >= end_from) & (ends <= end_to)
    return np.where(allowed, sums, np.inf)


def _spans(problem: CutProblem) -> tuple[Integers, Integers, Integers, Integers]:
    """Return the least and the most first block and end block of each stage, so that all have a block and places
    hold.
    """
    num_stages, num_blocks = problem.schedule.num_stages, len(problem.blocks)
    first_from, end_from = np.arange(num_stages), np.arange(num_stages) + 1
    first_to, end_to = first_from + num_blocks - num_stages, end_from + num_blocks - num_stages
    for block, stage in problem.places:
        first_to[stage], end_from[stage] = min(first_to[stage], block), max(end_from[stage], block + 1)
        first_from[stage + 1 :] = np.maximum(first_from[stage + 1 :], block + 1)
        end_to[:stage] = np.minimum(end_to[:stage], block)
    return first_from, first_to, end_from, end_to


def transfers(problem: CutProblem) -> Floats:
    """Return [stage, first block, end block]: half of the transfers at both ends, none to a stage of the same rank."""
    num_stages, num_blocks = problem.schedule.num_stages, len(problem.blocks)
    ranks = [problem.schedule.rank_of(stage) for stage in range(num_stages)]
    half = np.array([0.0, *problem.cut_seconds[1:], 0.0]) / 2
    table = np.zeros((num_stages, num_blocks + 1, num_blocks + 1))
    for stage, (before, after) in enumerate(pairwise(ranks)):
        if before != after:
            table[stage] += half[None, :]
            table[stage + 1] += half[:, None]
    return table
