"""What a stage holds of the memory of its rank, whose stages take turns: while it runs itself, and while others do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.memory.microbatches import END, Phase
from autopar.memory.model import MemoryModel
from autopar.memory.peak import PlanMoments, memory_use
from autopar.plans.rows import SAVED

TRANSIENT = ("working set", "gathered weights")
"""Parts of a stage's memory that are there only while it runs."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a stage; of a rank one stage is at its peak at most, while the others keep theirs."""

    kept: int
    """While others of its rank run: no less than that."""
    peak: int
    """At its fullest moment, while it runs."""
    lasting: int
    """Of what it keeps, at most, however few micro-batches it has in flight."""
    saved: int = 0
    """Beside that for each of them."""

    def with_fewer(self, in_flight: int) -> Held:
        """What it holds while it has only so many micro-batches in flight."""
        kept = min(self.kept, self.lasting + in_flight * self.saved)
        return replace(self, kept=kept, peak=self.peak - self.kept + kept)


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes of a stage that has so many micro-batches in flight: at its fullest moment, and while others run."""

    in_flight: int
    peak: int
    kept: int


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a stage may hold: at its fullest moment, and while others of its rank run."""

    peak: int
    kept: int
    fewer: tuple[Limit, ...] = ()
    """What it may hold while it has fewer micro-batches in flight, and others of its rank have more."""

    @property
    def least_kept(self) -> int:
        """What takes no more at its fullest moment has room whenever others run."""
        return min(self.kept, *(each.kept for each in self.fewer)) if self.fewer else self.kept

    def excess(self, held: Held) -> int:
        """Bytes by which a stage holds more than it may, at most; not above 0 where it has room."""
        found = [held.peak - self.peak, held.kept - self.kept]
        for each in self.fewer:
            then = held.with_fewer(each.in_flight)
            found += [then.peak - each.peak, then.kept - each.kept]
        return max(found)


def as_much(room: Room | None, other: Room | None) -> bool:
    """Whether a room is as large as another; None is as large as any."""
    if room is None or other is None:
        return room is None
    return (
        room.peak >= other.peak
        and room.kept >= other.kept
        and all(
            (each.peak >= other.peak and each.kept >= other.kept)
            or any(
                each.in_flight <= less.in_flight and each.peak >= less.peak and each.kept >= less.kept
                for less in other.fewer
            )
            for each in room.fewer
        )
    )


def held_by(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> Held:
    """What a stage holds by its choices.

    While others run, it keeps what all its micro-batches in flight have saved, received and sent, and all gradients, as
    they are added up and as they are reduced; where no micro-batch follows the first backward there are gradients
    beside one less of them. That is never more than at its fullest moment. Nor is it less than what is there at that
    moment and does not go with it, as `PipelinePlan.rank_bytes` counts.
    """
    peak, use, _ = memory_use(memory, choices, modes)
    runs = memory.microbatches
    if not runs.several or runs.stashes:
        return Held(peak, peak, peak)
    moments = PlanMoments(memory, choices, modes)
    saved = runs.in_flight * int(moments.kept.sum())
    running = sum(use.parts.get(name, 0) for name in (*TRANSIENT, *SAVED)) - saved
    full, without_one = (
        sum(moments.buffers(Phase(others, False)).values()) for others in (runs.in_flight - 1, runs.in_flight - 2)
    )
    waiting = saved + runs.in_flight * moments.sent + full
    beside = saved // runs.in_flight + moments.sent + full - without_one
    ending = sum(moments.ending(END).values()) + waiting - (beside if runs.in_flight == runs.count else 0)
    resting = max(moments.always_total + waiting, ending)
    kept = max(peak - running, min(resting, peak))
    each = saved // runs.in_flight
    # Where no micro-batch follows the first backward, it may be fullest with one less of them.
    return Held(kept, peak, kept - min(runs.in_flight, runs.count - 1) * each, each)
