"""Lifetimes of decisions: first use, segment and layer, and what the backward needs of each.

A segment is recomputed as one (`ir.program.recompute_segments`); a layer's weights are gathered, and its gradients
reduced, in one message (`costs.pricing.message_sizes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
from torch import fx

from autopar.costs.pricing.message_sizes import joined_layers
from autopar.costs.space.space import Decision, Space, TensorEdge
from autopar.ir.program.calls import module_of, source_of
from autopar.ir.program.paths import layer_of
from autopar.ir.program.recompute_segments import (
    MODES,
    OFFLOAD,
    RECOMPUTATIONS,
    Recomputation,
    offloadable,
    recomputation,
    segments_of,
)
from autopar.ir.program.saved_tensors import Saved, saved_in, saved_otherwise
from autopar.strategies.roles import RoledProgram

LATE = 1 << 40  # the position of what no call uses
Place = int | TensorEdge
"""A decision, by its number, or an edge: either has bytes and seconds."""


def ends_of(place: Place) -> tuple[int, ...]:
    """Return the decisions whose strategies say how much it is; the segment of the last says the mode."""
    return (place,) if isinstance(place, int) else (place.source, place.target)


class Lifetimes:
    """The order of the calls of a space, and who needs what; without bytes, which are in the other files."""

    def __init__(self, space: Space, modes: tuple[str, ...] = RECOMPUTATIONS) -> None:
        self.space, self.modes = space, modes
        """The modes that are offered: all, or those that send nothing to the host."""
        self.calls = [n for n, decision in enumerate(space.decisions) if decision.kind == "call"]
        """The calls in the order they run."""
        self.outgoing: dict[tuple[int, int], list[TensorEdge]] = defaultdict(list)
        """Decision and its output → the edges over which it goes to consumers."""
        for edge in space.edges:
            self.outgoing[edge.source, edge.source_output].append(edge)
        self._needs: dict[tuple[int, int], bool] = {}
        self._again: dict[str, dict[str, Recomputation]] = {}
        self._segment_of_node: dict[fx.Node, str] = {}
        framework = space.conventions
        self._saved_by_node = saved_otherwise(saved_in(space.program), framework.dropout_masks, framework.loss_in_place)
        products = RoledProgram.of(space.program).products
        for segment in segments_of(space.program):
            again = {mode: recomputation(space.program, segment, mode, products) for mode in modes}
            self._again[segment.name] = again
            self._segment_of_node.update(dict.fromkeys(segment.nodes, segment.name))
        self.segments = tuple(self._again)

    @property
    def offloads(self) -> bool:
        """True if what segments save for their backward may leave for the host."""
        return OFFLOAD in self.modes

    @cached_property
    def names(self) -> list[str]:
        """Names of the calls."""
        return [self.space.decisions[number].name for number in self.calls]

    # When.

    @cached_property
    def position(self) -> list[int]:
        """Position of each decision's first use in the order of calls; for a call, its own position."""
        found = [LATE] * len(self.space.decisions)
        for place, number in enumerate(self.calls):
            found[number] = place
        for edge in reversed(self.space.edges):  # the edges out of a shared reshard lie behind the one into it
            if self.space.decisions[edge.source].kind != "call":
                found[edge.source] = min(found[edge.source], found[edge.target])
        return found

    @cached_property
    def segment(self) -> list[str]:
        """Recompute segment of each call and shared reshard; "" for none."""
        return [
            self._segment_of_node.get(self._first_call(number).node, "") if d.kind in ("call", "shared_reshard") else ""
            for number, d in enumerate(self.space.decisions)
        ]

    def mode_of(self, number: int, modes: Mapping[str, str]) -> int:
        """Return the number of the mode of a decision's segment, where segments have these modes."""
        return MODES.index(modes.get(self.segment[number], MODES[0]))

    @cached_property
    def layer(self) -> list[str]:
        """Layer in which each decision runs, or is first used.

        Layers whose weights share a message count as the last of them.
        """
        joined = joined_layers(self.space.program)
        modules = [module_of(self._first_call(number).node) for number in range(len(self.space.decisions))]
        own = [self.segment[number] or layer_of(module) or module for number, module in enumerate(modules)]
        return [joined.get(layer, layer) for layer in own]

    @cached_property
    def places_by_layer(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position of each place in an order of places by layer, and where its layer begins and ends in that order."""
        layers = {layer: number for number, layer in enumerate(dict.fromkeys(self.layer))}
        numbers = np.array([layers[self.layer[number]] for number in self.calls], dtype=np.intp)
        rank, counts = np.empty_like(numbers), np.bincount(numbers, minlength=len(layers))
        rank[np.argsort(numbers, kind="stable")] = np.arange(len(numbers))
        ends = np.cumsum(counts)
        return rank, (ends - counts)[numbers], ends[numbers]

    # Layers that have weights, numbered in the order in which they run first.

    @cached_property
    def first_weight(self) -> dict[str, int]:
        """Layer → the place of its first call that takes a weight: before it all of the layer's arrive."""
        return self._by_layer(min, lambda _: True)

    @cached_property
    def last_gather(self) -> dict[str, int]:
        """Layer → the place of its last call that takes a weight which may be gathered again for the backward."""
        return self._by_layer(max, lambda edge: edge.tensor.regather)

    @cached_property
    def first_reduction(self) -> dict[str, int]:
        """Layer → the place of its first call that takes a weight with a gradient: then all of them are made."""
        return self._by_layer(min, lambda edge: edge.tensor.requires_grad)

    def _by_layer(self, chosen: Callable[..., int], counts: Callable[[TensorEdge], bool]) -> dict[str, int]:
        found: dict[str, int] = {}
        for edge in self.space.edges:
            place, layer = self.position[edge.target], self.layer[edge.target]
            if self.space.is_weight(edge.source) and counts(edge) and place < LATE:
                found[layer] = chosen(found.get(layer, place), place)
        return found

    def reached(self, forward: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return, by place, the layer with weights that a pass has come to, and the place's own (-1: it has none).

        Before the first of its layers a pass has come to one behind the last, which is none.
        """
        first = self.first_weight
        numbers = {layer: number for number, layer in enumerate(sorted(first, key=first.__getitem__))}
        own = np.array([numbers.get(self.layer[number], -1) for number in self.calls], dtype=np.intp)
        found, last = np.empty_like(own), len(first)
        places = range(len(own))
        for place in places if forward else reversed(places):
            last = own[place] if own[place] >= 0 else last
            found[place] = last
        return found, own

    @cached_property
    def segment_ends(self) -> np.ndarray:
        """Place behind the last call of each place's segment; the last entry is for what no call uses."""
        own = [self.segment[number] for number in self.calls]
        found = np.full(len(own) + 1, len(own), dtype=np.intp)
        for place in reversed(range(len(own) - 1)):
            found[place] = found[place + 1] if own[place] == own[place + 1] else place + 1
        return found

    @cached_property
    def arrivals(self) -> np.ndarray:
        """Place behind the last call that runs while rows from each place are on their way; the next if none does."""
        found = np.arange(1, len(self.calls) + 2)
        for exchange, nodes in self.space.meanwhile.items():
            first, last = (self.position[self.space.index[node.name]] for node in (exchange, nodes[-1]))
            found[first] = last + 1
        return found

    def modes_by_number(self, modes: Mapping[str, str]) -> np.ndarray:
        """Return the mode index of each decision's segment, given the mode of each segment."""
        return np.array([MODES.index(modes.get(name, MODES[0])) for name in self.segment], dtype=np.intp)

    def _first_call(self, number: int) -> Decision:
        """Return the call itself, or the first one that uses the decision."""
        place = self.position[number]
        return self.space.decisions[self.calls[place] if place < LATE else number]

    # Who needs what.

    def recomputations(self, number: int) -> tuple[Recomputation, ...]:
        """Return what each mode recomputes of a decision's segment; one empty entry if it has no segment."""
        name = self.segment[number]
        return tuple(self._again[name].values()) if name else (Recomputation(frozenset(), frozenset()),)

    def num_modes(self, number: int) -> int:
        """Return the number of recompute modes of a decision's segment; 1 if it has no segment."""
        return len(self.recomputations(number))

    def is_inside(self, edge: TensorEdge) -> bool:
        """Return whether an edge lies inside a segment."""
        return self.segment[edge.source] == self.segment[edge.target]

    def counts_behind(self, number: int, output: int, mode: int) -> bool:
        """Return whether a saved result of a product counts on the one edge that needs it.

        Where the edge moves the result, the segment saves what arrives, and the result itself is freed: of a partial
        sum its reduced part.
        """
        decision, edges = self.space.decisions[number], self.outgoing[number, output]
        return (
            len(edges) == 1
            and self.is_inside(edges[0])
            and decision.node in self.recomputations(number)[mode].saved
            and output not in self.saved(decision).outputs
            and (self.needs_input(edges[0]) or self.reruns(edges[0].target, mode))
        )

    def is_offloaded(self, number: int) -> bool:
        """Return whether the output of a call or shared reshard may be offloaded with the tensors a segment saves."""
        node = self.space.decisions[number].node
        return not self.space.is_weight(number) and source_of(node)[0] in offloadable(self.space.program)

    def saves_output(self, number: int, output: int, mode: int) -> bool:
        """Return whether an output of a decision is saved unmoved for some backward, in a mode.

        If it is not, a sent tensor is a copy of its own.
        """
        decision = self.space.decisions[number]
        if decision.node.op == "placeholder" or (mode > 0 and self.reruns(number, mode)):
            return False
        saved = self.saved(decision)
        if output in saved.aliases:
            return False
        return (decision.kind == "call" and output in saved.outputs) or self.needs_output(number, output)

    def reruns(self, number: int, mode: int) -> bool:
        """Return whether a call, or a consumer of a shared reshard, is recomputed in a mode."""
        decision = self.space.decisions[number]
        if decision.kind == "shared_reshard":
            return any(self.reruns(edge.target, mode) for edge in self.outgoing[number, 0])
        if decision.kind != "call" or not self.segment[number]:
            return False
        return decision.node in self.recomputations(number)[mode].rerun

    def needs_input(self, edge: TensorEdge) -> bool:
        """Return whether the backward of the edge's target needs the tensor.

        If the target is a view or shared reshard, its consumers count.
        """
        target = self.space.decisions[edge.target]
        if target.kind == "output":
            return False
        if target.kind == "shared_reshard":
            return self.needs_output(edge.target, 0)
        if edge.target_input in self.saved(target).inputs:
            return True
        return bool(self.saved(target).aliases) and self.needs_output(edge.target, 0)

    def needs_output(self, number: int, output: int) -> bool:
        """Return whether some backward needs an output of a decision."""
        if (number, output) not in self._needs:
            self._needs[number, output] = any(map(self.needs_input, self.outgoing[number, output]))
        return self._needs[number, output]

    def is_there_anyway(self, edge: TensorEdge) -> bool:
        """Return whether the tensor that leaves the source is counted as resident elsewhere."""
        source = self.space.decisions[edge.source]
        if source.kind != "call":
            return True  # parameters and inputs are always resident; the edge into a shared reshard counts its tensor
        saved = self.saved(source)
        return edge.source_output in saved.aliases or edge.source_output in saved.outputs or self.counts_before(edge)

    def counts_before(self, edge: TensorEdge) -> bool:
        """Return whether an earlier edge counts the tensor.

        Without a gradient a tensor has no shared reshard, which would count it.
        """
        if edge.tensor.requires_grad:
            return False
        return next(filter(self.needs_input, self.outgoing[edge.source, edge.source_output]), edge).end != edge.end

    def saved(self, decision: Decision) -> Saved:
        """Return what autograd saves for a call."""
        return self._saved_by_node[decision.node]
