"""Bytes that calls and edges save for the backward, and that their backward works on, by decision and by edge.

Between forward and backward a call holds the tensors that autograd saves for it (queried from autograd, see
`ir.program.saved_tensors`):

    its own outputs and hidden tensors    counted on the call
    its inputs                            counted on the edge, in the layout in which they arrive, unless the tensor is
                                          there anyway: not moved, and saved by its producer, a parameter or an input

Views count where their memory was made. Under recomputation (`ir.program.recompute_segments`) a segment holds only what
its second run begins with (`second_forward`): tensors from outside, results of collectives unless these run again, and,
if selective, results of products. A segment saves its offloaded tensors (`host_copies`) on the device while it runs,
and while the calls after it do, up to the next segment. A program without gradients saves nothing.
"""

from __future__ import annotations

import numpy as np

from autopar.costs.memory.lifetimes import Place
from autopar.costs.memory.microbatches import Accumulation, Microbatches
from autopar.costs.memory.second_forward import FULL_MODE, SecondForward
from autopar.costs.memory.tensor_bytes import UNSTATED, Bytes, Modes, OfTensors, TensorBytes, shared, stated_or
from autopar.costs.space.space import Decision, TensorEdge
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.ir.program.saved_tensors import LOSSES
from autopar.ir.sharding.operation import largest_split_input


class SavedBytes(OfTensors):
    """Bytes of every decision (one entry per strategy) and edge (a matrix over the strategies at its ends)."""

    def __init__(self, tensors: TensorBytes, microbatches: Microbatches) -> None:
        super().__init__(tensors)
        self.second_forward, self.accumulation = SecondForward(tensors), Accumulation(tensors, microbatches)

    def of(self, place: Place) -> Modes | None:
        """Return the saved bytes of a call's own, or on account of an edge, by mode; None if there are none."""
        return self.own(place) if isinstance(place, int) else self.edge(place)

    def own(self, number: int, with_rerun: bool = False) -> Modes | None:
        """Return the saved bytes of a call's own outputs and hidden tensors, by mode; None if it saves nothing.

        `with_rerun`: while its segment runs again, with what that makes; outputs that others save count on their edges.
        """
        decision = self.space.decisions[number]
        if decision.kind != "call":
            return None
        saved, again = self.lifetimes.saved(decision), self.lifetimes.recomputations(number)
        outputs, gone = frozenset(range(len(decision.call.outputs))), (frozenset[int](), False)
        if with_rerun:
            alone = {output for output in outputs if not self.lifetimes.needs_output(number, output)}
            outputs, gone = saved.outputs | alone, (saved.outputs, True)
        states: list[tuple[frozenset[int], bool]] = [(saved.outputs, True)]
        for position, each in enumerate(again[1:], 1):
            mode = self.lifetimes.modes[position]
            if decision.node in each.rerun or (mode == OFFLOAD and self.lifetimes.is_offloaded(number)):
                states.append(gone)
            elif decision.node in each.saved:
                behind = {output for output in outputs if self.lifetimes.counts_behind(number, output, position)}
                states.append((outputs - behind, True))
            else:
                states.append((saved.outputs, True))
        hides = bool(saved.other_bytes or self.tensors.states("saved_bytes", decision))

        def bytes_in(mode: int, outputs: frozenset[int], with_hidden: bool) -> Bytes:
            if not (with_hidden and hides):
                return self._outputs(decision, outputs - saved.aliases, 0)
            hidden = self._hidden(decision, saved.other_bytes, self.second_forward.variant(decision, mode))
            return self.tensors.applied(np.add, self._outputs(decision, outputs - saved.aliases, 0), hidden)

        if not any(outputs or (with_hidden and hides) for outputs, with_hidden in states):
            return None
        arrays, talking = [bytes_in(mode, *state) for mode, state in enumerate(states)], self._communicates(decision)
        for mode, each in enumerate(again):
            if decision.node in each.rerun and mode != FULL_MODE and talking.any():
                # A call that communicates by itself runs again in the mode full alone: else its results stay.
                arrays[mode] = self.tensors.applied(np.where, talking, bytes_in(0, outputs, True), arrays[mode])
        return self.tensors.modes(arrays)

    @shared
    def _communicates(self, decision: Decision) -> np.ndarray:
        """Return which strategies of a call run collectives of their own in the forward."""
        return np.array([strategy.communicates for strategy in decision.candidates.strategies])

    @shared
    def _outputs(self, decision: Decision, outputs: frozenset[int], mode: int) -> Bytes:
        strategies = self.second_forward.running_in(decision, mode)
        total = self.tensors.nothing((len(strategies),))
        for position in outputs:
            layouts = [strategy.outputs[position] for strategy in strategies]
            total = total + self.tensors.of(decision.call.outputs[position], layouts)
        return total

    @shared
    def _hidden(self, decision: Decision, other_bytes: int, mode: int) -> Bytes:
        """Return the bytes that a call saves besides inputs and outputs: split as the largest input that can be.

        Autograd saves `other_bytes` for the whole call; implementations may state others.
        """
        call, strategies = decision.call, self.second_forward.running_in(decision, mode)
        if not call.inputs or not (other_bytes or self.tensors.states("saved_bytes", decision)):
            return self.tensors.nothing((len(strategies),))
        largest = largest_split_input(call, decision.candidates.bound)
        layouts = tuple([strategy.inputs[largest] for strategy in strategies])
        local = self.tensors.local(call.inputs[largest].shape, layouts, 1)
        return stated_or(
            self.tensors.stated("saved_bytes", decision, mode),
            self.tensors.hidden(decision, other_bytes, largest, local),
        )

    def edge(self, edge: TensorEdge) -> Modes | None:
        """Return the bytes of a tensor on account of an edge, by mode and strategies at its ends; None: no bytes."""
        if self.accumulation.holds(edge):
            return None
        return self.cached(("saved on", edge.end), lambda: self._edge(edge))

    def _edge(self, edge: TensorEdge) -> Modes | None:
        source, target = self.space.decisions[edge.source], self.space.decisions[edge.target]
        if target.kind == "output":
            return None
        needed, there = self.lifetimes.needs_input(edge), self.lifetimes.is_there_anyway(edge)
        found = [self._kept_by_target(edge, there) if needed else None]
        inside = self.lifetimes.is_inside(edge)
        for mode in range(1, self.lifetimes.num_modes(edge.target)):
            again = self.second_forward.moves_again(edge, mode)
            if self.lifetimes.modes[mode] == OFFLOAD:
                found.append(None if self.lifetimes.is_offloaded(edge.source) else found[0])
            elif self.space.is_weight(edge.source):
                # A cast that stays where it is is made again.
                found.append(self.tensors.saved(edge, True) if needed else None)
            elif not needed and not self.lifetimes.reruns(edge.target, mode):
                found.append(None)
            elif inside:
                alone = self.lifetimes.counts_behind(edge.source, edge.source_output, mode)
                found.append(self._sent_once(edge, again, alone))
            else:
                is_counted = self.lifetimes.counts_before(edge) or (source.kind in ("input", "buffer") and there)
                found.append(self._entering(edge, is_counted, again))
        if all(each is None for each in found):
            return None
        nothing = self.tensors.nothing((len(source.candidates.strategies), len(target.candidates.strategies)))
        return self.tensors.modes([nothing if each is None else each for each in found])

    @shared
    def _sent_once(self, edge: TensorEdge, again: np.ndarray | None, alone: bool) -> Bytes:
        """Return the bytes that a segment saves of a tensor that it has sent itself; none if the collectives run
        `again`.

        `alone`: the tensor is a saved result that no other edge needs; it counts here if it is not sent.
        """
        (before, after), sent = self.tensors.bytes_at_ends(edge), self.tensors.communicated(edge)
        arrives = sent if again is None else sent & ~again
        return np.where(arrives, after[None, :], before[:, None] if alone else 0)

    @shared
    def _entering(self, edge: TensorEdge, there: bool, again: np.ndarray | None) -> Bytes:
        """Return the bytes that a segment saves of a tensor from outside; as it was before the collectives that run
        `again`.
        """
        saved_bytes = self.tensors.saved(edge, there)
        if again is None:
            return saved_bytes
        return np.where(again, 0 if there else self.tensors.bytes_at_ends(edge)[0][:, None], saved_bytes)

    @shared
    def _kept_by_target(self, edge: TensorEdge, there: bool) -> Bytes:
        """Return the bytes of a tensor saved as it arrives, by those strategies of its target that save it."""
        saved_bytes, target = self.tensors.saved(edge, there), self.space.decisions[edge.target]
        candidates = target.candidates
        if target.kind == "shared_reshard":
            lets_go = [each.shared for each in candidates.strategies]
        elif candidates.bound is None or candidates.call is None:
            return saved_bytes
        else:
            lets_go = [
                each.implemented
                and edge.target_input
                in each.implementation.unkept(candidates.call, self.tensors.local_sizes(each, candidates.bound))
                for each in candidates.strategies
            ]
        return np.where(lets_go, 0, saved_bytes) if any(lets_go) else saved_bytes

    def working(self, number: int) -> Modes | None:
        """Return the working bytes of a call's backward, by mode: its outputs, gradients of all it takes and makes.

        That includes what it saves besides inputs and outputs, such as the probabilities of a loss. It excludes
        gradients that its forward has made.
        """
        decision = self.space.decisions[number]
        if decision.kind != "call" or self.lifetimes.saved(decision).aliases:
            return None
        tensors = frozenset(range(len(decision.call.inputs))), frozenset(range(len(decision.call.outputs)))
        other_bytes = self.lifetimes.saved(decision).other_bytes
        modes = [self.second_forward.variant(decision, mode) for mode in range(self.lifetimes.num_modes(number))]
        return self.tensors.modes([self._working(decision, *tensors, other_bytes, mode) for mode in modes])

    @shared
    def _working(
        self, decision: Decision, inputs: frozenset[int], outputs: frozenset[int], other_bytes: int, mode: int
    ) -> Bytes:
        """Return the bytes of some inputs' gradients, some outputs, and what is saved besides both."""
        call, strategies = decision.call, self.second_forward.running_in(decision, mode)
        total = self._gradients_of(decision, inputs) + self._outputs(decision, outputs, mode)
        op, bound = decision.candidates.op, decision.candidates.bound
        hidden = self._hidden(decision, other_bytes, mode)
        # A loss may make its gradient where its logits were.
        if not (self.space.conventions.loss_in_place and decision.node.target in LOSSES):
            hidden = stated_or(self.tensors.stated("backward_bytes", decision, mode), hidden)
        hidden = np.where(self.tensors.stated("forward_bytes", decision, mode) == UNSTATED, hidden, 0)
        if op is not None and bound is not None and op.backward_bytes is not None:
            total = total + self.tensors.array(
                [op.backward_bytes(call, self.tensors.local_sizes(s, bound)) for s in strategies]
            )
        return total + hidden

    def working_forward(self, number: int) -> Bytes | None:
        """Return the bytes that a call's forward works on if it makes its gradients; None if it does not."""
        decision = self.space.decisions[number]
        if decision.candidates.bound is None or not self.tensors.states("forward_bytes", decision):
            return None
        return self.tensors.applied(stated_or, self.tensors.stated("forward_bytes", decision), 0)

    def handed_on(self, number: int) -> Bytes | None:
        """Return the bytes of gradients that a backward leaves for calls before it: of inputs that are no weights."""
        decision, inbound = self.space.decisions[number], self.space.inbound
        if decision.kind != "call":
            return None
        learned = [position for position, info in enumerate(decision.call.inputs) if info.requires_grad]
        inputs = frozenset(each for each in learned if not self.space.is_weight(inbound[number, each].source))
        return self._gradients_of(decision, inputs)

    def working_rows(self, number: int) -> Bytes:
        """Return the part of `working` that is expert rows and their gradients."""
        decision, rows = self.space.decisions[number], self.space.rows[number]
        return self._working(decision, rows.inputs, rows.outputs, self.lifetimes.saved(decision).other_bytes, 0)

    def handed_on_rows(self, number: int) -> Bytes:
        """Return the part of `handed_on` that is gradients of expert rows."""
        return self._gradients_of(self.space.decisions[number], self.space.rows[number].inputs)

    @shared
    def _gradients_of(self, decision: Decision, inputs: frozenset[int]) -> Bytes:
        """Return the bytes of the gradients of those of these inputs that need one."""
        strategies = decision.candidates.strategies
        total = self.tensors.nothing((len(strategies),))
        for position, info in enumerate(decision.call.inputs):
            if position in inputs and info.requires_grad:
                total = total + self.tensors.of(info, [strategy.inputs[position] for strategy in strategies])
        return total

    def with_rerun(self, saved: Modes) -> Modes:
        """Return the bytes by mode while a segment itself runs again: what it saves, and all that it makes again."""
        greater = [each if each is saved[0] else self.tensors.applied(np.maximum, saved[0], each) for each in saved]
        return self.tensors.modes(greater)
