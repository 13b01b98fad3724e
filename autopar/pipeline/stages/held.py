"""What a stage holds of the memory of its rank, whose stages take turns: while it runs itself, and while others do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.memory.microbatches import END
from autopar.memory.model import MemoryModel
from autopar.memory.peak import PlanMoments, memory_use

TRANSIENT = ("working set", "gathered weights")
"""Parts of a stage's memory that are there only while it runs."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a stage; of a rank one stage is at its peak at most, while the others keep theirs."""

    kept: int
    """While others of its rank run: no less than that."""
    peak: int
    """At its fullest moment, while it runs."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a stage may hold: at its fullest moment, and while others of its rank run."""

    peak: int
    kept: int


def as_much(room: Room | None, other: Room | None) -> bool:
    """Whether a room is as large as another; None is as large as any."""
    return room is None or (other is not None and room.peak >= other.peak and room.kept >= other.kept)


def held_by(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> Held:
    """What a stage holds by its choices.

    While others run, it keeps what all its micro-batches in flight have saved and sent, and all gradients, as they are
    added up and as they are reduced; where no micro-batch follows the first backward there are gradients beside one
    less of them. That is never more than at its fullest moment. Nor is it less than what is there at that moment and
    does not go with it, as `PipelinePlan.rank_bytes` counts.
    """
    peak, use, _ = memory_use(memory, choices, modes)
    runs = memory.microbatches
    if not runs.several or runs.stashes:
        return Held(peak, peak)
    moments = PlanMoments(memory, choices, modes)
    saved = runs.in_flight * int(moments.kept.sum())
    running = sum(use.parts.get(name, 0) for name in (*TRANSIENT, "activations")) - saved
    waiting, beside = saved + runs.in_flight * moments.sent, saved // runs.in_flight + moments.sent
    ending = sum(moments.ending(END).values()) + waiting - (beside if runs.in_flight == runs.count else 0)
    resting = max(moments.always_total + waiting, ending)
    return Held(max(peak - running, min(resting, peak)), peak)
