"""How long a step of a pipeline takes: every rank runs its order, and waits for what comes from other ranks.

    start of F(s, i)      = max(rank is free, end of F(s-1, i) + transfer)
    start of B, I(s, i)   = max(rank is free, end of F(s, i), end of B or I(s+1, i) + transfer)
    start of W(s, i)      = max(rank is free, end of I(s, i))

A transfer overlaps computation and is not queued behind others; between stages of one rank there is none. What a rank
does once per step (reducing gradients, the optimizer) follows its last computation. For equal stages without transfers
this gives the bubble of GPipe and 1F1B, (ranks - 1) / (micro-batches + ranks - 1) (Narayanan et al., SC 2021, 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from autopar.pipeline.schedules.schedule import KINDS, Action, Schedule

Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage: of one micro-batch, and `once` per step.

    `send_forward` is the transfer of its outputs to the stage after it, `send_backward` that of its inputs' gradients
    to the stage before it.
    """

    forward: float
    backward_input: float
    backward_weight: float
    send_forward: float = 0.0
    send_backward: float = 0.0
    once: float = 0.0

    def __post_init__(self) -> None:
        assert all(getattr(self, each.name) >= 0 for each in fields(self)), f"negative seconds: {self}"

    def of(self, kind: str) -> float:
        """Seconds of one computation, by the kind of its step."""
        whole = self.backward_input + self.backward_weight
        return {"F": self.forward, "B": whole, "I": self.backward_input, "W": self.backward_weight}[kind]


@dataclass(frozen=True, slots=True)
class Slice:
    """What a rank does from `start` to `end`; kind "once" is what a stage does once per step, without a micro-batch."""

    rank: int
    stage: int
    kind: str
    microbatch: int | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of the pipeline: its slices by rank and time, its seconds, and the share of rank-time that is idle."""

    slices: tuple[Slice, ...]
    seconds: float
    bubble: float


def simulate(schedule: Schedule, seconds: Sequence[StageSeconds]) -> Timeline:
    """The timeline of one step; `seconds[s]` is what stage s takes."""
    assert len(seconds) == schedule.num_stages, f"{len(seconds)} stages for {schedule}"
    lasting = {(kind, stage): each.of(kind) for stage, each in enumerate(seconds) for kind in KINDS}
    transfers = _transfers(schedule, seconds)
    ends: dict[Key, float] = {}
    free = [0.0] * schedule.num_ranks
    slices: list[list[Slice]] = [[] for _ in schedule.orders]
    waiting = [list(reversed(order)) for order in schedule.orders]
    while any(waiting):
        before = len(ends)
        for rank, steps in enumerate(waiting):
            while steps and (arrived := _arrival(steps[-1], transfers, ends)) is not None:
                step = steps.pop()
                start = max(free[rank], arrived)
                free[rank] = start + lasting[step.kind, step.stage]
                ends[_key(step)] = free[rank]
                slices[rank].append(Slice(rank, step.stage, step.kind, step.microbatch, start, free[rank]))
        assert len(ends) > before, f"{schedule} waits for itself: {[str(steps[-1]) for steps in waiting if steps]}"
    for rank, own in enumerate(slices):
        for stage in schedule.stages_of(rank):
            if seconds[stage].once > 0:
                own.append(Slice(rank, stage, "once", None, free[rank], free[rank] + seconds[stage].once))
                free[rank] += seconds[stage].once
    flat = tuple(each for own in slices for each in own)
    return Timeline(flat, max(free), _bubble(flat, schedule.num_ranks * max(free)))


def _key(step: Action) -> Key:
    """What others wait for: a whole backward gives the gradient of the input as much as I does."""
    return "I" if step.kind == "B" else step.kind, step.stage, step.microbatch


def _transfers(schedule: Schedule, seconds: Sequence[StageSeconds]) -> dict[tuple[str, int], float]:
    """Seconds between a stage and the one that it reads from, by the kind of what is read; none at the model's ends."""
    transfers = {}
    for before, after in pairwise(range(schedule.num_stages)):
        far = schedule.rank_of(before) != schedule.rank_of(after)
        transfers["F", after] = seconds[before].send_forward if far else 0.0
        transfers["I", before] = seconds[after].send_backward if far else 0.0
    return transfers


def _arrival(step: Action, transfers: dict[tuple[str, int], float], ends: dict[Key, float]) -> float | None:
    """Seconds at which all that `step` reads is on its rank; None while something of it has not run."""
    stage, microbatch = step.stage, step.microbatch
    if step.kind == "W":
        return ends.get(("I", stage, microbatch))
    forward = step.kind == "F"
    own = 0.0 if forward else ends.get(("F", stage, microbatch))
    read, other = ("F", stage - 1) if forward else ("I", stage + 1)
    transfer = transfers.get((read, stage))
    if own is None or transfer is None:
        return own
    end = ends.get((read, other, microbatch))
    return None if end is None else max(own, end + transfer)


def _bubble(slices: Sequence[Slice], rank_seconds: float) -> float:
    """The share of `rank_seconds` in which no slice runs."""
    if rank_seconds == 0:
        return 0.0
    return max(0.0, 1.0 - sum(each.end - each.start for each in slices) / rank_seconds)
