"""Which calls use what arrives at a decision: where the first of them runs, and which keep it for their backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.memory.model import MemoryModel
from autopar.space.space import Wire


class Uses:
    """The wires of a space read forwards; `places` says where calls stand in the order in which they run."""

    def __init__(self, memory: MemoryModel, places: Mapping[int, int]) -> None:
        self.memory, self.places = memory, places
        self.outgoing: dict[int, list[Wire]] = defaultdict(list)
        for wire in memory.space.wires:
            self.outgoing[wire.source].append(wire)

    def keepers(self, wire: Wire) -> Iterator[int]:
        """The calls that keep what a wire brings for their backward, through views and hubs."""
        target = self.memory.space.decisions[wire.target]
        saved = self.memory.lifetimes.saved(target) if target.kind == "call" else None
        if saved is not None and wire.target_input in saved.inputs:
            yield wire.target
        elif target.kind == "hub" or (saved is not None and saved.aliases):
            for each in self.outgoing[wire.target]:
                yield from self.keepers(each)

    def first(self, number: int) -> int:
        """The place of the first call that uses what arrives at a decision; the last place of all where none does.

        Its gradient is there when the backward has come so far.
        """
        if number in self.places:
            return self.places[number]
        return min((self.first(wire.target) for wire in self.outgoing[number]), default=max(self.places.values()))
