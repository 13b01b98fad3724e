"""Simulation of a pipeline's step: every rank runs its order, and waits for results of other ranks.

    start of F(s, i)      = max(rank is free, end of F(s-1, i) + transfer)
    start of B, I(s, i)   = max(rank is free, end of F(s, i), end of B or I(s+1, i) + transfer)
    start of W(s, i)      = max(rank is free, end of I(s, i))

A transfer overlaps computation and is not queued behind others; stages of one rank need none between them. The gradient
reductions of a stage overlap its last B or W. The rest of them overlaps the next computations of its rank, queued
behind the rank's reductions of other stages:

    end of reductions(s)    = max(end of last B or W(s) + what is left, end of reductions before + all reductions(s))

Other work of a rank once per step (the optimizer) follows its last computation and all reductions. Equal stages without
transfers give the bubble of GPipe and 1F1B, (ranks - 1) / (micro-batches + ranks - 1) (Narayanan et al., SC 2021, 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.console.units import format_seconds
from autopar.planning.pipeline.schedules.schedule import KINDS, Action, Schedule

KEPT = 4
"""Schedules whose computations stay in order, a few MB each: one is simulated again and again, others once."""
Floats = NDArray[np.float64]
Seconds = TypeVar("Seconds", float, Floats)
Key = tuple[str, int, int]
"""Result that others wait for: F or I, of a stage, for a micro-batch."""
_Step = tuple[int, Action, tuple[tuple[Key, bool], ...]]
"""A rank, what it computes, and what that reads; whether it comes from another rank."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage: of one micro-batch, `once` per step, and of reductions overlapped with the last backward.

    `send_forward` is the transfer of its outputs to the stage after it, `send_backward` that of its inputs' gradients
    to the stage before it.
    """

    forward: float
    backward_input: float
    backward_weight: float
    send_forward: float = 0.0
    send_backward: float = 0.0
    once: float = 0.0
    last_backward: float = 0.0
    """Seconds by which the last backward is longer, because gradient reductions overlap it."""
    last_send: float = 0.0
    """Seconds by which the transfer of the last gradient is longer, for the same reason."""
    reducing: float = 0.0
    """Seconds for which gradient reductions run on after the last backward."""
    reductions: float = 0.0
    """Seconds of all gradient reductions, if nothing overlaps them."""

    def __post_init__(self) -> None:
        assert all(getattr(self, each.name) >= 0 for each in fields(self)), f"negative seconds: {self}"

    def of(self, kind: str) -> float:
        """Return the seconds of one computation, by the kind of its step."""
        return _by_kind(self.forward, self.backward_input, self.backward_weight)[kind]

    def sent(self, kind: str) -> float:
        """Return the seconds of the transfer of what F or I make."""
        return self.send_forward if kind == "F" else self.send_backward


@dataclass(frozen=True, slots=True)
class Slice:
    """Interval of a rank's work, from `start` to `end`.

    Kind "once" is the work of a stage once per step, without a micro-batch.
    """

    rank: int
    stage: int
    kind: str
    microbatch: int | None
    start: float
    end: float


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """A step of the pipeline: its slices by rank and time, its seconds, and the share of rank-time that is idle."""

    slices: tuple[Slice, ...]
    seconds: float
    bubble: float

    def __repr__(self) -> str:
        return f"Timeline({len(self.slices)} slices, {format_seconds(self.seconds)}, bubble {self.bubble:.1%})"


def simulate(schedule: Schedule, seconds: Sequence[StageSeconds]) -> Timeline:
    """Return the timeline of one step; `seconds[s]` is what stage s takes."""
    assert len(seconds) == schedule.num_stages, f"{len(seconds)} stages for {schedule}"
    lasting = {(kind, stage): each.of(kind) for stage, each in enumerate(seconds) for kind in KINDS}
    sent = {(kind, stage): each.sent(kind) for stage, each in enumerate(seconds) for kind in ("F", "I")}
    last = schedule.num_microbatches - 1
    last_sent = {("I", stage, last): each.last_send for stage, each in enumerate(seconds)}
    ends: dict[Key, float] = {}
    free, reduced = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    slices: list[list[Slice]] = [[] for _ in schedule.orders]
    for rank, step, reads in _in_order(schedule):
        arrived = [ends[key] + (sent[key[:2]] + last_sent.get(key, 0.0) if is_far else 0.0) for key, is_far in reads]
        start = max(free[rank], *arrived) if arrived else free[rank]
        own, reduces = seconds[step.stage], step.microbatch == last and step.kind in ("B", "W")
        free[rank] = start + lasting[step.kind, step.stage] + (own.last_backward if reduces else 0.0)
        ends[_key(step)] = free[rank]
        slices[rank].append(Slice(rank, step.stage, step.kind, step.microbatch, start, free[rank]))
        if reduces and own.reductions:
            reduced[rank] = max(free[rank] + own.reducing, reduced[rank] + own.reductions)
    for rank, made in enumerate(slices):
        free[rank] = max(free[rank], reduced[rank])
        for stage in schedule.stages_of(rank):
            if seconds[stage].once > 0:
                made.append(Slice(rank, stage, "once", None, free[rank], free[rank] + seconds[stage].once))
                free[rank] += seconds[stage].once
    flat = tuple(each for own in slices for each in own)
    return Timeline(flat, max(free), _bubble(flat, schedule.num_ranks * max(free)))


def seconds_of_each(schedule: Schedule, seconds: Mapping[str, Floats]) -> Floats:
    """Return the seconds of many steps, as `simulate` finds them one by one if no reduction overlaps with a backward.

    `seconds` has the fields of `StageSeconds` up to `once`, each [stage, step].
    """
    lasting = _by_kind(seconds["forward"], seconds["backward_input"], seconds["backward_weight"])
    sent = {"F": seconds["send_forward"], "I": seconds["send_backward"]}
    ends: dict[Key, Floats] = {}
    free = np.zeros((schedule.num_ranks, seconds["once"].shape[1]))
    for rank, step, reads in _in_order(schedule):
        start = free[rank]
        for key, is_far in reads:
            start = np.maximum(start, ends[key] + sent[key[0]][key[1]] if is_far else ends[key])
        free[rank] = ends[_key(step)] = start + lasting[step.kind][step.stage]
    for rank in range(schedule.num_ranks):
        free[rank] += seconds["once"][list(schedule.stages_of(rank))].sum(axis=0)
    return free.max(axis=0)


def _by_kind(forward: Seconds, inputs: Seconds, weights: Seconds) -> dict[str, Seconds]:
    return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}


@lru_cache(maxsize=KEPT)
def _in_order(schedule: Schedule) -> tuple[_Step, ...]:
    """Sort computations behind their rank's earlier ones and behind their inputs."""
    rank_of = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    found: list[_Step] = []
    made: set[Key] = set()
    waiting = [list(reversed(order)) for order in schedule.orders]
    while any(waiting):
        before = len(found)
        for rank, steps in enumerate(waiting):
            while steps and made.issuperset(reads := _reads(steps[-1], schedule.num_stages)):
                step = steps.pop()
                found.append((rank, step, tuple([(key, rank_of[key[1]] != rank) for key in reads])))
                made.add(_key(step))
        assert len(found) > before, f"{schedule} waits for itself: {[str(steps[-1]) for steps in waiting if steps]}"
    return tuple(found)


def _key(step: Action) -> Key:
    """Return the result of a computation; a whole backward makes the gradient of the input, as I does."""
    return "I" if step.kind == "B" else step.kind, step.stage, step.microbatch


def _reads(step: Action, num_stages: int) -> list[Key]:
    stage, microbatch = step.stage, step.microbatch
    if step.kind == "W":
        return [("I", stage, microbatch)]
    if step.kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    later = [("I", stage + 1, microbatch)] if stage + 1 < num_stages else []
    return [("F", stage, microbatch), *later]


def _bubble(slices: Sequence[Slice], rank_seconds: float) -> float:
    """Return the share of `rank_seconds` in which no slice runs."""
    if rank_seconds == 0:
        return 0.0
    return max(0.0, 1.0 - sum(each.end - each.start for each in slices) / rank_seconds)
