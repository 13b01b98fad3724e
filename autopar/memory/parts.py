"""What decisions and wires hold at some moment or other, looked up once: arrays that moments and peaks add up.

Whether a part is there at a moment, `moments` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.memory.model import MemoryModel
from autopar.memory.tensor_bytes import Bytes, Modes
from autopar.space.space import Wire


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Of a decision; None where it has no such part."""

    stored: tuple[tuple[str, Bytes], ...]
    gradients: Bytes | None
    own: Modes | None


@dataclass(frozen=True, slots=True)
class WeightParts:
    """Of a wire that brings a weight."""

    gathered: Bytes | None
    again: Bytes | None
    copied: Bytes | None
    unreduced: Bytes | None
    sent_off: Bytes | None
    last_made: Bytes | None
    on_way: Bytes | None
    on_way_again: Bytes | None


@dataclass(frozen=True, slots=True)
class ManyParts:
    """Of a wire, on account of many micro-batches."""

    held: Bytes | None
    accumulated: Bytes | None
    fresh: Bytes | None
    reduced: Bytes | None
    arrived: Bytes | None


@dataclass(frozen=True, slots=True)
class WireParts:
    """Of a wire; None where it has no such part."""

    kept: Modes | None
    sent: Modes | None
    weight: WeightParts | None
    many: ManyParts | None


def parts_of(memory: MemoryModel, number: int) -> NodeParts:
    """Those of a decision."""
    found = memory.parts.get(number)
    if found is None:
        stored = tuple(memory.stored(number).items())
        found = NodeParts(stored, memory.accumulation.gradients(number), memory.own(number))
        memory.parts[number] = found
    return found


def parts_on(memory: MemoryModel, wire: Wire) -> WireParts:
    """Those of a wire."""
    end = wire.target, wire.target_input
    found = memory.parts.get(end)
    if found is None:
        weight = _of_weight(memory, wire) if memory.space.is_weight(wire.source) else None
        many = _of_many(memory, wire) if memory.accumulation.holds(wire) else None
        found = WireParts(memory.wire(wire), memory.accumulation.sent(wire), weight, many)
        memory.parts[end] = found
    return found


def _of_weight(memory: MemoryModel, wire: Wire) -> WeightParts:
    weights = memory.weights
    return WeightParts(
        weights.gathered(wire),
        weights.gathered_again(wire),
        weights.copied_out(wire),
        weights.unreduced(wire),
        weights.sent_off(wire),
        weights.last_made(wire),
        weights.on_way(wire, True),
        weights.on_way(wire, False),
    )


def _of_many(memory: MemoryModel, wire: Wire) -> ManyParts:
    more = memory.accumulation
    return ManyParts(more.held(wire), more.accumulated(wire), more.fresh(wire), more.reduced(wire), more.arrived(wire))
