"""Uses of what arrives at a decision: its first call, and the calls that save it for their backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.space import Wire


class Uses:
    """The edges of a space read forwards; `places` has the positions of calls in the order in which they run."""

    def __init__(self, memory: MemoryModel, places: Mapping[int, int]) -> None:
        self.memory, self.places = memory, places
        self.outgoing: dict[int, list[Wire]] = defaultdict(list)
        for wire in memory.space.wires:
            self.outgoing[wire.source].append(wire)

    def keepers(self, wire: Wire) -> Iterator[int]:
        """Yield the calls that save an edge's tensor for their backward, through views and shared reshards."""
        target = self.memory.space.decisions[wire.target]
        saved = self.memory.lifetimes.saved(target) if target.kind == "call" else None
        if saved is not None and wire.target_input in saved.inputs:
            yield wire.target
        elif target.kind == "hub" or (saved is not None and saved.aliases):
            for each in self.outgoing[wire.target]:
                yield from self.keepers(each)

    def is_made_again(self, number: int, modes: Mapping[str, str]) -> bool:
        """Return whether something that a call saves for its backward is made by calls or gathers that run again."""
        lifetimes, space = self.memory.lifetimes, self.memory.space
        mode, saved = lifetimes.mode_of(number, modes), lifetimes.saved(space.decisions[number])
        if lifetimes.reruns(number, mode) and (saved.outputs or saved.other_bytes):
            return True
        return any(self._arrives_again(space.inbound[number, position], mode) for position in saved.inputs)

    def _arrives_again(self, wire: Wire, mode: int) -> bool:
        lifetimes, second = self.memory.lifetimes, self.memory.second_forward
        if second.moves_again(wire, mode) is not None:
            return True
        if self.memory.space.decisions[wire.source].kind == "hub":
            return self._arrives_again(self.memory.space.inbound[wire.source, 0], mode)
        inside = lifetimes.segment[wire.source] == lifetimes.segment[wire.target]
        return inside and lifetimes.reruns(wire.source, mode)

    def takers(self, wire: Wire) -> Iterator[int]:
        """Yield the calls that take an edge's tensor, through shared reshards."""
        if self.memory.space.decisions[wire.target].kind != "hub":
            yield wire.target
            return
        for each in self.outgoing[wire.target]:
            yield from self.takers(each)

    def first(self, number: int) -> int:
        """Return the place of the first call that uses what arrives at a decision; the last place of all where none
        does.

        Its gradient is there when the backward has come so far.
        """
        if number in self.places:
            return self.places[number]
        return min((self.first(wire.target) for wire in self.outgoing[number]), default=max(self.places.values()))
