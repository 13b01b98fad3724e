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
from autopar.ir.program.recompute_segments import MODES, OFFLOAD
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
        outputs, gone = frozenset(range(len(_call(decision).outputs))), (frozenset[int](), False)
        if with_rerun:
            alone = {output for output in outputs if not self.lifetimes.needs_output(number, output)}
            outputs, gone = saved.outputs | alone, (saved.outputs, True)
        states: list[tuple[frozenset[int], bool]] = [(saved.outputs, True)]
        for position, each in enumerate(again[1:], 1):
            mode = self.lifetimes.modes[position]
            if decision.node in each.rerun or (mode == OFFLOAD and self.lifetimes.is_offloaded(number)):
                states.append(gone)
            elif decision.node in each.saved:
                states.append((outputs - self.lifetimes.counted_on_edges(number, position), True))
            else:
                states.append((saved.outputs, True))
        hides = bool(saved.other_bytes or self.tensors.states("saved_bytes", decision))

        def bytes_in(mode: int, outputs: frozenset[int], with_hidden: bool) -> Bytes:
            if not (with_hidden and hides):
                return self._outputs(decision, outputs - saved.aliases, 0)
            mode = self.second_forward.variant(decision, mode)
            return self._own(decision, outputs - saved.aliases, saved.other_bytes, mode)

        if not any(outputs or (with_hidden and hides) for outputs, with_hidden in states):
            return None
        arrays = tuple(bytes_in(mode, *state) for mode, state in enumerate(states))
        talking = self.second_forward.communicates(decision)
        if talking.any():  # a call that communicates by itself runs again in the mode full alone: else its results stay
            given = bytes_in(0, outputs, True)
            held = [given if decision.node in e.rerun else array for e, array in zip(again, arrays, strict=True)]
            held[FULL_MODE : FULL_MODE + 1] = arrays[FULL_MODE : FULL_MODE + 1]
            if len(again) == len(MODES):  # its saved tensors are offloaded like all others
                held[-1] = arrays[-1]
            arrays = tuple(self._chosen(talking, h, array) for h, array in zip(held, arrays, strict=True))
        return self.tensors.modes(arrays)

    @shared
    def _chosen(self, mask: np.ndarray, one: Bytes, other: Bytes) -> Bytes:
        return np.where(mask, one, other)

    @shared
    def _own(self, decision: Decision, outputs: frozenset[int], other_bytes: int, mode: int) -> Bytes:
        return self._outputs(decision, outputs, 0) + self._hidden(decision, other_bytes, mode)

    @shared
    def _outputs(self, decision: Decision, outputs: frozenset[int], mode: int) -> Bytes:
        strategies = self.second_forward.running_in(decision, mode)
        total = self.tensors.nothing((len(strategies),))
        for position in outputs:
            info = _call(decision).outputs[position]
            total = total + self.tensors.local(
                info.shape, [s.outputs[position] for s in strategies], info.dtype.itemsize
            )
        return total

    @shared
    def _hidden(self, decision: Decision, other_bytes: int, mode: int) -> Bytes:
        """Return the bytes that a call saves besides inputs and outputs: split as the largest input that can be.

        Autograd saves `other_bytes` for the whole call; implementations may state others.
        """
        call, strategies = _call(decision), self.second_forward.running_in(decision, mode)
        if not call.inputs or not (other_bytes or self.tensors.states("saved_bytes", decision)):
            return self.tensors.nothing((len(strategies),))
        largest = largest_split_input(call, decision.candidates.bound)
        local = self.tensors.local(call.inputs[largest].shape, [s.inputs[largest] for s in strategies], 1)
        return stated_or(
            self.tensors.stated("saved_bytes", decision, mode),
            self.tensors.hidden(decision, other_bytes, largest, local),
        )

    def edge(self, edge: TensorEdge) -> Modes | None:
        """Return the bytes of a tensor on account of an edge, by mode and strategies at its ends; None: no bytes."""
        if self.accumulation.holds(edge):
            return None
        return self.cached(("saved on", edge.end), lambda: self._edge(edge, self.lifetimes.needs_of(edge)))

    @shared
    def _edge(self, edge: TensorEdge, needs: tuple[object, ...]) -> Modes | None:
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
                found.append(self._sent_once(edge, again, self.lifetimes.counts_source(edge, mode)))
            else:
                is_counted = self.lifetimes.counts_before(edge) or (source.kind in ("input", "buffer") and there)
                found.append(self._entering(edge, is_counted, again))
        if all(each is None for each in found):
            return None
        nothing = self.tensors.nothing((len(source.candidates.strategies), len(target.candidates.strategies)))
        return self.tensors.modes([nothing if each is None else each for each in found])

    def _sent_once(self, edge: TensorEdge, again: np.ndarray | None, alone: bool) -> Bytes:
        """Return the bytes that a segment saves of a tensor that it has sent itself; none if the collectives run
        `again`.

        `alone`: the tensor is a saved result that no other edge needs; it counts here if it is not sent.
        """
        sent = self.tensors.sent(edge)
        return sent if again is None and not alone else self._sent_or_made(edge, again, alone)

    @shared
    def _sent_or_made(self, edge: TensorEdge, again: np.ndarray | None, alone: bool) -> Bytes:
        unsent = ~self.tensors.communicated(edge) if again is None else ~self.tensors.communicated(edge) | again
        return np.where(unsent, self.tensors.bytes_at_ends(edge)[0][:, None] if alone else 0, self.tensors.sent(edge))

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
        tensors = frozenset(range(len(_call(decision).inputs))), frozenset(range(len(_call(decision).outputs)))
        other_bytes = self.lifetimes.saved(decision).other_bytes
        modes = [self.second_forward.variant(decision, mode) for mode in range(self.lifetimes.num_modes(number))]
        return self.tensors.modes([self._working(decision, *tensors, other_bytes, mode) for mode in modes])

    @shared
    def _working(
        self, decision: Decision, inputs: frozenset[int], outputs: frozenset[int], other_bytes: int, mode: int
    ) -> Bytes:
        """Return the bytes of some inputs' gradients, some outputs, and what is saved besides both."""
        call, strategies = _call(decision), self.second_forward.running_in(decision, mode)
        total = self._gradients_of(decision, inputs) + self._outputs(decision, outputs, mode)
        op, bound = decision.candidates.op, decision.candidates.bound
        hidden = self._hidden(decision, other_bytes, mode)
        if not self.lifetimes.in_place(decision):
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
        makes = decision.candidates.bound is not None and self.tensors.states("forward_bytes", decision)
        return self._stated_alone(decision) if makes else None

    @shared
    def _stated_alone(self, decision: Decision) -> Bytes:
        stated = self.tensors.stated("forward_bytes", decision)
        return stated_or(stated, np.zeros_like(stated))

    def handed_on(self, number: int) -> Bytes | None:
        """Return the bytes of gradients that a backward leaves for calls before it: of inputs that are no weights."""
        decision, inbound = self.space.decisions[number], self.space.inbound
        if decision.kind != "call":
            return None
        learned = [position for position, info in enumerate(_call(decision).inputs) if info.requires_grad]
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
        for position, info in enumerate(_call(decision).inputs):
            if position in inputs and info.requires_grad:
                total = total + self.tensors.local(
                    info.shape, [s.inputs[position] for s in strategies], info.dtype.itemsize
                )
        return total

    def with_rerun(self, saved: Modes) -> Modes:
        """Return the bytes by mode while a segment itself runs again: what it saves, and all that it makes again."""
        return self.tensors.modes([each if each is saved[0] else self._greater(saved[0], each) for each in saved])

    @shared
    def _greater(self, one: Bytes, other: Bytes) -> Bytes:
        return np.maximum(one, other)


def _call(decision: Decision):
    call = decision.candidates.call
    assert call is not None, f"{decision.name} is no call"
    return call
