"""Memory of a stage on its rank, whose stages take turns: bytes while it runs, and bytes while others run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costs.memory.microbatches import END, Phase
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import Role
from autopar.costs.memory.peak import PlanMoments, memory_use
from autopar.costs.plans.decision_rows import SAVED

TRANSIENT = ("working set", "gathered weights")
"""Parts of a stage's memory that are there only while it runs."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of a stage; of a rank one stage is at its peak at most, while those of the others are resident."""

    resident: int
    """While others of its rank run: no less than that."""
    peak: int
    """At its fullest moment, while it runs."""
    lasting: int
    """Part of `resident` that remains however few micro-batches are in flight, at most."""
    saved: int = 0
    """Bytes of `resident` per micro-batch in flight, on top of `lasting`."""
    working: int = 0
    """Bytes while it runs, on top of what waits, if the peak has fewer micro-batches in flight than wait at once."""

    @property
    def running(self) -> int:
        """Bytes on top of `resident` while it runs."""
        return max(self.peak - self.resident, self.working)

    def with_fewer(self, in_flight: int) -> StageBytes:
        """Return the bytes while only `in_flight` micro-batches are in flight."""
        resident = min(self.resident, self.lasting + in_flight * self.saved)
        return replace(self, resident=resident, peak=min(self.peak, resident + self.running))


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes of a stage that has so many micro-batches in flight: at its fullest moment, and while others run."""

    in_flight: int
    peak: int
    resident: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that a stage may hold: at its fullest moment, and while others of its rank run."""

    peak: int
    resident: int
    fewer: tuple[Limit, ...] = ()
    """Limits at moments when the stage has fewer micro-batches in flight and other stages of its rank have more."""

    @property
    def least_resident(self) -> int:
        """Least `resident` of this limit and of those in `fewer`; a stage whose peak is no higher always fits."""
        return min(self.resident, *(each.resident for each in self.fewer)) if self.fewer else self.resident

    def bytes_over(self, stage_bytes: StageBytes) -> int:
        """Return the most bytes by which a stage exceeds its budget; at most 0 if it fits."""
        found = [stage_bytes.peak - self.peak, stage_bytes.resident - self.resident]
        for each in self.fewer:
            then = stage_bytes.with_fewer(each.in_flight)
            found += [then.peak - each.peak, then.resident - each.resident]
        return max(found)


def is_at_least(budget: MemoryBudget | None, other: MemoryBudget | None) -> bool:
    """Return whether a memory budget is at least as large as another; None is unlimited."""
    if budget is None or other is None:
        return budget is None
    return (
        budget.peak >= other.peak
        and budget.resident >= other.resident
        and all(
            (each.peak >= other.peak and each.resident >= other.resident)
            or any(
                each.in_flight <= less.in_flight and each.peak >= less.peak and each.resident >= less.resident
                for less in other.fewer
            )
            for each in budget.fewer
        )
    )


def stage_bytes_of(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> StageBytes:
    """Return the bytes that a stage holds by its choices.

    While other stages run, all that its micro-batches in flight have saved and received is resident, and what it sent
    last. So are all gradients, both those that accumulate and those that are being reduced. If no micro-batch follows
    the first backward, gradients exist next to one micro-batch fewer. The resident bytes are at most the peak. They are
    at least the part of the peak that does not end with the stage's run, as `PipelinePlan.rank_bytes` counts.
    """
    peak, use, _ = memory_use(memory, choices, modes)
    runs = memory.microbatches
    if not runs.several or runs.stashes:
        return StageBytes(peak, peak, peak)
    moments = PlanMoments(memory, choices, modes)
    each = int(moments.of(Role.SAVED, Role.OFFLOADED, Role.RECEIVED).sum())
    running, working = running_bytes(use.parts, each, runs.in_flight)
    full, without_one = (
        sum(moments.standing(Phase(others, False)).values()) for others in (runs.in_flight - 1, runs.in_flight - 2)
    )
    saved = int(moments.of(Role.SAVED, Role.OFFLOADED).sum())
    standing = full + runs.in_flight * saved
    waiting = standing - int(moments.of(Role.STORED, Role.MOVED).sum())
    without_first = saved + full - without_one
    ending = sum(moments.at(0, END, 0).values()) + waiting - (without_first if runs.in_flight == runs.count else 0)
    resting = max(peak - running, min(max(standing, ending), peak))
    # If no forward follows the first backward, the peak may be later, with one micro-batch fewer.
    lasting = resting - min(runs.in_flight, runs.count - 1) * each
    return StageBytes(min(resting, peak), peak, lasting, each, working)


def running_bytes(parts: Mapping[str, int], each: int, in_flight: int) -> tuple[int, int]:
    """Return the bytes of a stage's peak on top of those that wait for a backward at most, and at the peak.

    The first number is negative if much fewer micro-batches wait at the peak; else the second is 0.

    Args:
        parts: The parts of the stage's memory at its peak.
        each: Bytes that wait for the backward of one micro-batch.
        in_flight: Micro-batches in flight at most.
    """
    saved = sum(parts.get(name, 0) for name in SAVED)
    held = saved + sum(parts.get(name, 0) for name in TRANSIENT)
    running = held - in_flight * each
    return running, 0 if running >= 0 else max(held - math.ceil(saved / each) * each, 0)
