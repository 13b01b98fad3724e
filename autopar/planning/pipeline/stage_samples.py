"""Samples of the value of memory to a pipeline's stages: stages of medium length, planned within several limits.

Of the stages of a cut that have the same kinds of blocks, such as layers alone, or layers and the head, one is sampled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, product

from autopar.errors import TimeLimitError
from autopar.planning.pipeline.stage_search import SearchedStage, StageSearch
from autopar.planning.pipeline.stages.memory_budgets import Sampled
from autopar.planning.pipeline.stages.stage_bytes import MemoryBudget
from autopar.solver.deadline import is_over, seconds_until

LIMITS = ((1.0, 1.05), (0.5, 0.85), (0.5, 1.2), (0.125, 0.75), (1.0, 1.25), (0.5, 1.55), (0.125, 1.0), (1.0, 1.6))
"""Stage and memory limit of each sample, as (position, limit).

The position selects a stage by its micro-batches in flight, from the least (0) to the most (1). The limit is a multiple
of an equal share of a rank's memory.
"""
OF_A_BLOCK = ((1.0, 1.05), (1.0, math.inf), (0.125, 0.4), (0.5, 0.85), (0.125, 0.6), (1.0, 1.6))
"""The same for stages of one block, whose plans are not mixed of others: some have much memory, others little."""
SHARE_OF_TIME = 0.4
"""Share of the remaining time that samples may take, at most; further samples are left out."""
NEAR, ROUGHLY = 0.05, 0.2
"""Relative optimality gaps of samples, and of the first plans of large stages."""
LARGE = 150
"""Decisions of a large stage."""
REQUESTED = 8
"""Large stages that are planned, those of the cut that samples lead to among them, before the best cut is taken."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """Stages of a cut that have the same kinds of blocks, one of which is sampled for all."""

    stages: Sequence[int]
    """Numbers of the stages, with ascending micro-batches in flight."""
    span: tuple[int, int]
    """First block and end block of one of middling length."""
    found: list[SearchedStage] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def limits(self) -> Sequence[tuple[float, float]]:
        return LIMITS if self.num_blocks > 1 else OF_A_BLOCK


def sampled(search: StageSearch, starts: Sequence[int], memory: int) -> list[Sampled]:
    """Return the samples of each stage of a cut: choices of a stage with the same kinds of blocks, with what they hold.

    Samples serve the search for stages, too.
    """
    spans, count = list(pairwise((*starts, len(search.planned.blocks)))), len(search.runs)
    chunks = search.planned.request.schedule.chunks
    every = _alike(search, spans)
    until = search.deadline - (1 - SHARE_OF_TIME) * seconds_until(search.deadline)
    for number, alike in product(range(max(len(LIMITS), len(OF_A_BLOCK))), every):
        if number >= len(alike.limits) or is_over(until):
            continue
        place, share = alike.limits[number]
        limit = int(min(share * memory / chunks, memory))
        search.budgets = (MemoryBudget(limit, limit),) * count
        with suppress(TimeLimitError):
            alike.found.append(search.ask(*alike.span, alike.stages[int(place * (len(alike.stages) - 1))], NEAR))
    search.roughly = NEAR
    if any(each.made and len(each.made.space.decisions) > LARGE for alike in every for each in alike.found):
        search.roughly, search.most_planned = ROUGHLY, REQUESTED
    by_stage = {stage: each for alike in every for stage, each in _samples_of(search, alike, spans)}
    return [by_stage[stage] for stage in range(count)]


def _alike(search: StageSearch, spans: Sequence[tuple[int, int]]) -> list[_Alike]:
    """Return the stages of a cut in groups that have the same kinds of blocks."""
    groups: defaultdict[frozenset[int], list[int]] = defaultdict(list)
    for stage, (first, end) in enumerate(spans):
        groups[frozenset(search.kinds[first:end])].append(stage)
    found = []
    for stages in groups.values():
        by_length = sorted((spans[stage] for stage in stages), key=lambda span: search.own_seconds(*span))
        by_flight = sorted(stages, key=lambda stage: search.runs[stage].in_flight)
        found.append(_Alike(by_flight, by_length[len(by_length) // 2]))
    return found


def _samples_of(search: StageSearch, alike: _Alike, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Sampled]]:
    """Yield the samples of every stage of a group."""

    ends = alike.stages[0], alike.stages[-1]
    made = [
        pair
        for each in alike.found
        if each.made is not None
        for pair in product(*(search.sample(each, stage) for stage in ends))
    ]
    least, most = (search.runs[stage].in_flight for stage in ends)
    seconds = search.own_seconds(*alike.span)
    for stage in alike.stages:
        share = (search.runs[stage].in_flight - least) / max(most - least, 1)  # bytes grow with those in flight
        samples = [one.towards(other, share) for one, other in made]
        yield stage, Sampled(samples, seconds, alike.num_blocks, search.own_seconds(*spans[stage]) / seconds)
