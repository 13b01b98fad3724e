"""Samples of the value of memory to a pipeline's stages: a stage of medium length, planned within several limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, product

from autopar.errors import TimeLimitError
from autopar.planning.pipeline.stage_search import SearchedStage, StageSearch
from autopar.planning.pipeline.stages.memory_budgets import Sample, SamplesOf
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


def sampled(search: StageSearch, starts: Sequence[int], memory: int) -> tuple[SamplesOf, float, int]:
    """Return the samples of each stage: choices of a stage of middling length of a cut, with what they hold there.

    The seconds are those of its blocks, by the plan of the whole, and the number is that of its blocks. Samples serve
    the search for stages, too.
    """
    spans = sorted(pairwise((*starts, len(search.planned.blocks))), key=lambda span: search.own_seconds(*span))
    first, end = spans[len(spans) // 2]
    in_flight = [runs.in_flight for runs in search.runs]
    count, chunks = len(in_flight), search.planned.request.schedule.chunks
    by_flight = sorted(range(count), key=in_flight.__getitem__)
    found: list[SearchedStage] = []
    until = search.deadline - (1 - SHARE_OF_TIME) * seconds_until(search.deadline)
    for place, share in LIMITS if end - first > 1 else OF_A_BLOCK:
        limit = int(min(share * memory / chunks, memory))
        search.budgets = (MemoryBudget(limit, limit),) * count
        with suppress(TimeLimitError):
            found.append(search.ask(first, end, by_flight[int(place * (count - 1))], NEAR))
        if is_over(until):
            break
    if any(each.made is not None and len(each.made.space.decisions) > LARGE for each in found):
        search.roughly, search.most_planned = ROUGHLY, REQUESTED

    def of(known: SearchedStage, stage: int) -> Sequence[Sample]:
        return Sample.of(known.seconds, search.holding(known, search.runs[stage]), in_flight[stage])

    ends = by_flight[0], by_flight[-1]
    made = [pair for each in found if each.made is not None for pair in product(*(of(each, stage) for stage in ends))]
    least, most = (in_flight[stage] for stage in ends)

    def samples(stage: int) -> Sequence[Sample]:
        share = (in_flight[stage] - least) / max(most - least, 1)  # bytes grow with the micro-batches in flight
        return [one.towards(other, share) for one, other in made]

    return samples, search.own_seconds(first, end), end - first
