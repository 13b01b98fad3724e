"""Uses of what arrives at a decision: its first call, and the calls that save it for their backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.space import TensorEdge


class Uses:
    """The edges of a space read forwards; `places` has the positions of calls in the order in which they run."""

    def __init__(self, memory: MemoryModel, places: Mapping[int, int]) -> None:
        self.memory, self.places = memory, places
        self.outgoing: dict[int, list[TensorEdge]] = defaultdict(list)
        for edge in memory.space.edges:
            self.outgoing[edge.source].append(edge)

    def keepers(self, edge: TensorEdge) -> Iterator[int]:
        """Yield the calls that save an edge's tensor for their backward, through views and shared reshards."""
        target = self.memory.space.decisions[edge.target]
        saved = self.memory.lifetimes.saved(target) if target.kind == "call" else None
        if saved is not None and edge.target_input in saved.inputs:
            yield edge.target
        elif target.kind == "shared_reshard" or (saved is not None and saved.aliases):
            for each in self.outgoing[edge.target]:
                yield from self.keepers(each)

    def is_made_again(self, number: int, modes: Mapping[str, str]) -> bool:
        """Return whether something that a call saves for its backward is made by calls or gathers that run again."""
        lifetimes, space = self.memory.lifetimes, self.memory.space
        mode, saved = lifetimes.mode_of(number, modes), lifetimes.saved(space.decisions[number])
        if lifetimes.reruns(number, mode) and (saved.outputs or saved.other_bytes):
            return True
        return any(self._arrives_again(space.inbound[number, position], mode) for position in saved.inputs)

    def _arrives_again(self, edge: TensorEdge, mode: int) -> bool:
        lifetimes, second = self.memory.lifetimes, self.memory.second_forward
        if second.moves_again(edge, mode) is not None:
            return True
        if self.memory.space.decisions[edge.source].kind == "shared_reshard":
            return self._arrives_again(self.memory.space.inbound[edge.source, 0], mode)
        inside = lifetimes.segment[edge.source] == lifetimes.segment[edge.target]
        return inside and lifetimes.reruns(edge.source, mode)

    def takers(self, edge: TensorEdge) -> Iterator[int]:
        """Yield the calls that take an edge's tensor, through shared reshards."""
        if self.memory.space.decisions[edge.target].kind != "shared_reshard":
            yield edge.target
            return
        for each in self.outgoing[edge.target]:
            yield from self.takers(each)

    def first(self, number: int) -> int:
        """Return the place of the first call that uses what arrives at a decision; the last place of all where none
        does.

        Its gradient is there when the backward has come so far.
        """
        if number in self.places:
            return self.places[number]
        users = self.outgoing[number]
        return min(self.first(edge.target) for edge in users) if users else max(self.places.values())
