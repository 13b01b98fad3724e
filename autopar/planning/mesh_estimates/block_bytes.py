"""Bytes of every block of a model on one device by one plan, which add up to those of a stage.

stored       parameters, optimizer state, and weights that are resident as they were moved, all the time
gradients    as they are added up
reduced      the same as they are stored, at the end of a step
saved        for the backward of one micro-batch
arriving     of these what comes from blocks before: a stage that begins with the block has it among what it receives
transient    in addition, at the fullest moment of the block, what it saves itself included

A stage of blocks i .. j with f micro-batches in flight takes, while block b runs backward,

    sum of stored + sum of gradients + (f - 1) * sum of saved + (saved of i .. b - 1) + transient of b

where of gradients that are not added up only those behind b are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costs.memory.microbatches import Phase
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import Role
from autopar.costs.memory.peak import PlanMoments
from autopar.costs.memory.resident_parts import all_parts

Floats = NDArray[np.float64]
LASTING = {Role.STORED: "stored", Role.MOVED: "stored", Role.GRADIENT: "gradients", Role.REDUCED: "reduced"}
SAVED = (Role.SAVED, Role.OFFLOADED)


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """Bytes of a device on every stage, arrays of one entry for each."""

    stored: Floats
    gradients: Floats
    ending: Floats
    """Gradients, and what they are reduced to, at the end of a step."""
    saved: Floats
    """Bytes that one micro-batch saves for its backward."""
    running: Floats
    """At the fullest moment of a backward, besides what is stored, accumulated and saved for other micro-batches."""
    accumulates: bool

    def peak(self, in_flight: Floats) -> Floats:
        """Return the bytes at the fullest moment, with so many micro-batches in flight on each stage."""
        if not self.accumulates:
            return self.stored + self.running
        running = self.gradients + (in_flight - 1) * self.saved + self.running
        return self.stored + np.maximum(running, self.ending)

    def resident(self, in_flight: Floats) -> Floats:
        """Return the bytes of stages while others of their rank run."""
        return self.stored + self.gradients + in_flight * self.saved


def bytes_of_blocks(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], homes: Sequence[int | None], count: int
) -> dict[str, Floats]:
    """Return the bytes of blocks of the shorter program by what they are."""
    calls = len(memory.lifetimes.calls)
    moments = PlanMoments(memory, choices, modes)
    at_place = np.array([homes[number] if homes[number] is not None else 0 for number in memory.lifetimes.calls])
    found = {name: np.zeros(count) for name in ("stored", "gradients", "reduced", "saved", "arriving", "transient")}
    of_mode = memory.lifetimes.modes_by_number(modes)
    for part in all_parts(memory):
        at, source = tuple(choices[end] for end in part.ends), homes[part.ends[0]]
        if part.role in LASTING:
            found[LASTING[part.role]][homes[part.ends[-1]] or 0] += float(part.modes[0][at])
        elif part.role in SAVED and part.modes and part.used < calls and source is not None:
            num_bytes = float(part.modes[min(of_mode[part.of], len(part.modes) - 1)][at])
            found["arriving"][at_place[part.used]] += num_bytes * bool(source < at_place[part.used])
    np.add.at(found["saved"], at_place, moments.of(*SAVED)[:calls])
    phase = Phase(0, first=not memory.microbatches.several)
    totals = moments.totals(phase).max(axis=0)
    before = np.concatenate([[0.0], np.cumsum(found["saved"])])[at_place]
    if memory.microbatches.several:
        there = np.full(calls, float(moments.of(Role.GRADIENT).sum()))
    else:
        behind = found["gradients"].sum() - np.cumsum(found["gradients"])
        there = behind[at_place]
    always = sum(moments.standing(phase).values())
    np.maximum.at(found["transient"], at_place, np.maximum(totals - always - there - before, 0.0))
    return found
