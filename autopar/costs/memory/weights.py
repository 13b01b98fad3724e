"""Memory of weights and their gradients in transit between their storage and their use by calls.

`moments` says when each is resident: a weight as it is gathered, forward and again for the backward, with the message
that it is copied out of; a gradient as its call has made it, and as the message that reduces it; a weight on its way,
with the part of it that is sent: counted whole, though of several gathers only the first is issued ahead.

Weights that are gathered alone are freed one by one, yet all count while their layer runs.

Layers that have weights are numbered in the order in which they run first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from autopar.costs.memory.accumulation import Accumulation
from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.memory.tensor_bytes import Bytes, TensorBytes
from autopar.costs.space.space import TensorEdge


class MovedWeights:
    """Bytes of edges that bring a weight; arrays as those of `TensorBytes`, and shared."""

    def __init__(self, tensors: TensorBytes, lifetimes: Lifetimes, accumulation: Accumulation) -> None:
        self.tensors, self.lifetimes, self.accumulation = tensors, lifetimes, accumulation
        self.space = tensors.space

    @cached_property
    def last_gather(self) -> dict[str, int]:
        """Layer → the place of its last call that takes a weight which may be gathered again for the backward."""
        return self._by_layer(max, lambda edge: edge.tensor.regather)

    @cached_property
    def first_reduction(self) -> dict[str, int]:
        """Layer → the place of its first call that takes a weight with a gradient: then all of them are made."""
        return self._by_layer(min, lambda edge: edge.tensor.requires_grad)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers that have weights."""
        return len(self.first_places)

    def reached(self, forward: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return, by place, the layer with weights that a pass has come to, and the place's own (-1: it has none).

        Before the first of its layers a pass has come to `num_layers`, which is none.
        """
        first = self.first_places
        numbers = {layer: number for number, layer in enumerate(sorted(first, key=first.__getitem__))}
        own = np.array(
            [numbers.get(self.lifetimes.layer[number], -1) for number in self.lifetimes.calls], dtype=np.intp
        )
        found, last = np.empty_like(own), self.num_layers
        places = range(len(own))
        for place in places if forward else reversed(places):
            last = own[place] if own[place] >= 0 else last
            found[place] = last
        return found, own

    def _by_layer(self, chosen: Callable[..., int], counts: Callable[[TensorEdge], bool]) -> dict[str, int]:
        found: dict[str, int] = {}
        for edge in self.space.edges:
            place = self.lifetimes.position[edge.target]
            if self.space.is_weight(edge.source) and counts(edge) and place < len(self.lifetimes.calls):
                found[self.lifetimes.layer[edge.target]] = chosen(
                    found.get(self.lifetimes.layer[edge.target], place), place
                )
        return found

    def gathered(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's edge while its layer runs: the gathered weight, unless it is saved."""
        return self._of_weight("gathered", edge, self._gathered)

    def gathered_again(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's edge as it is gathered again for the backward; None if it never is."""
        return self._of_weight("gathered again", edge, self._gathered_again) if edge.tensor.regather else None

    def copied_out(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's edge in the message from which it is copied, as it is gathered again."""
        return self._of_weight("copied out", edge, self._copied_out) if edge.tensor.regather else None

    @cached_property
    def first_places(self) -> dict[str, int]:
        """Layer → the place of its first call that takes a weight: before it all of the layer's arrive."""
        return self._by_layer(min, lambda _: True)

    def arriving(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's edge in the message from which it is copied, before its layer's forward."""
        return self._of_weight("arriving", edge, self._arriving)

    def _arriving(self, edge: TensorEdge) -> Bytes:
        moved = self.tensors.communicated(edge) & ~self.tensors.gathered_alone(edge)
        return np.where(moved, self.tensors.bytes_at_ends(edge)[1][None, :], 0)

    def on_way(self, edge: TensorEdge, forward: bool) -> Bytes | None:
        """Return the bytes of a prefetched parameter's edge: the whole weight, and the part that is sent."""
        if forward:
            return self._of_weight("on way", edge, lambda edge: self._on_way(edge, self.tensors.communicated(edge)))
        if not edge.tensor.regather:
            return None
        return self._of_weight("on way again", edge, lambda edge: self._on_way(edge, self.accumulation.each_time(edge)))

    def gathers(self, choices: Sequence[int]) -> bool:
        """Return whether any weight is gathered during a step under these choices."""
        found = ((self.on_way(edge, True), edge) for edge in self.space.edges)
        return any(each is not None and each[choices[w.source], choices[w.target]] for each, w in found)

    def unreduced(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's edge between its call's backward and the layer's: its gradient."""
        return self._of_weight("unreduced", edge, self._unreduced, True) if edge.tensor.requires_grad else None

    def last_made(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's edge, besides `unreduced`, if its gradient is its layer's last."""
        return self._of_weight("last made", edge, self._last_made, True) if edge.tensor.requires_grad else None

    def sent_off(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's edge while its layer's gradients are reduced: its gradient as sent."""
        return self._of_weight("sent off", edge, self._sent_off, True) if edge.tensor.requires_grad else None

    def _of_weight(
        self, name: str, edge: TensorEdge, make: Callable[[TensorEdge], Bytes], of_gradient: bool = False
    ) -> Bytes | None:
        if not self.space.is_weight(edge.source):
            return None
        found = self.tensors.cached((name, self.space.kind(edge)), lambda: make(edge))
        if not self.accumulation.holds(edge):
            return found
        more = self.accumulation
        each_time = more.reduced_each_time(edge) if of_gradient else more.each_time(edge)
        return self.tensors.cached((name, "each time", self.space.kind(edge)), lambda: np.where(each_time, found, 0))

    def _gathered(self, edge: TensorEdge) -> Bytes:
        _, after = self.tensors.bytes_at_ends(edge)
        found = np.where(self.tensors.communicated(edge), after[None, :], 0)
        strategies = self.space.decisions[edge.source].candidates.strategies
        found[np.array([strategy.saved for strategy in strategies])] = 0  # counted as saved
        return found

    def _on_way(self, edge: TensorEdge, gathered: np.ndarray) -> Bytes:
        before, after = self.tensors.bytes_at_ends(edge)
        return np.where(gathered & self.tensors.only_gathers(edge), before[:, None] + after[None, :], 0)

    def _gathered_again(self, edge: TensorEdge) -> Bytes:
        _, after = self.tensors.bytes_at_ends(edge)
        return np.where(self.accumulation.each_time(edge), after[None, :], 0)

    def _copied_out(self, edge: TensorEdge) -> Bytes:
        again = self._gathered_again(edge)
        return np.where(self.tensors.gathered_alone(edge), 0, again) if again.any() else again

    def _unreduced(self, edge: TensorEdge) -> Bytes:
        _, after = self.tensors.bytes_at_ends(edge)
        return np.where(self.tensors.communicated(edge) | self.tensors.reduced(edge), after[None, :], 0)

    def _last_made(self, edge: TensorEdge) -> Bytes:
        _, after = self.tensors.bytes_at_ends(edge)
        moves, reduced = self.tensors.communicated(edge), edge.tensor.reduced
        if reduced is None:
            return np.where(moves, after[None, :], 0)  # a tensor that is only reduced stays in its send buffer
        sent = after // edge.tensor.dtype.itemsize * reduced.itemsize
        return np.where(moves | self.tensors.reduced(edge), sent[None, :], 0)

    def _sent_off(self, edge: TensorEdge) -> Bytes:
        sent = self._last_made(edge)
        if edge.tensor.reduced is not None or not sent.any():
            return sent
        return np.where(self.tensors.sent_alone(edge), 0, sent)
