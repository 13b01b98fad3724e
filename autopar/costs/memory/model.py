"""Memory model: bytes per device of each choice, by decision and by edge.

A parameter holds itself and its gradient in its storage layout, and its optimizer state and master copy unless these
are on the host. Between forward and backward a call holds the tensors that autograd saves for it (queried from
autograd, see `ir.program.saved_tensors`):

    its own outputs and hidden tensors    counted on the call
    its inputs                            counted on the edge, in the layout in which they arrive, unless the tensor is
                                          there anyway: not moved, and saved by its producer, a parameter or an input

Views count where their memory was made. `weights` counts weights and their gradients in transit. Under recomputation
(`ir.program.recompute_segments`) a segment holds only what its second run begins with (`second_forward`): tensors from
outside, results of collectives unless these run again, and, if selective, results of products. A segment saves its
offloaded tensors (`host_copies`) on the device while it runs, and while the calls after it do, up to the next segment.
A program without gradients saves nothing; `live` says what is alive in it.

All this is for one micro-batch. If a step has several, `accumulation` says what is resident in addition, and instead.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.costs.memory.accumulation import Accumulation
from autopar.costs.memory.host_copies import HostCopies
from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.memory.live import Live
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.second_forward import FULL_MODE, SecondForward
from autopar.costs.memory.tensor_bytes import UNSTATED, Bytes, Modes, TensorBytes, stated_or
from autopar.costs.memory.weights import MovedWeights
from autopar.costs.pricing.optimizer_step import step_working_bytes
from autopar.costs.space.space import Decision, Space, TensorEdge
from autopar.costs.space.strategy import Strategy
from autopar.ir.program.recompute_segments import MODES, OFFLOAD, RECOMPUTATIONS
from autopar.ir.program.saved_tensors import Saved
from autopar.ir.sharding.operation import largest_split_input


class MemoryModel(TensorBytes):
    """Bytes of every decision (one entry per strategy) and edge (a matrix over the strategies at its ends).

    Equal calls share their arrays, which must not be changed.
    """

    def __init__(
        self,
        space: Space,
        microbatches: Microbatches | None = None,
        prefetch: int = 0,
        offloads: bool = False,
        lifetimes: Lifetimes | None = None,
    ) -> None:
        """`offloads`: what segments save for their backward may leave for the host.

        `lifetimes` are those of a space with the same calls, if they are known.
        """
        super().__init__(space)
        self.stepping = self._stepping()
        """Parameter → working bytes of its step, besides what it updates: in the backward, or the most behind it."""
        works = bool(self.stepping) and not space.optimizer.in_backward
        self.microbatches = replace(microbatches or Microbatches(), works=works)
        self.prefetch = prefetch
        """Number of layers ahead of their use that weights are fetched."""
        self.lifetimes = lifetimes or Lifetimes(space, MODES if offloads else RECOMPUTATIONS)
        bytes_of = self.own, self.edge, self.stays, self.cached
        self.host_copies = HostCopies(space, self.lifetimes, *bytes_of, lambda: self.widened().host_copies)
        self.second_forward = SecondForward(self, self.lifetimes, self.host_copies)
        self._edges: dict[object, Modes | None] = {}  # by end, and by kind and needs
        self.parts: dict[object, Any] = {}  # cache of `parts`, by decision and edge
        self.accumulation = Accumulation(self, self.lifetimes, self.microbatches)
        self.weights = MovedWeights(self, self.lifetimes, self.accumulation)
        self.live = None if space.program.learns or self.microbatches.several else Live(self, self.lifetimes)
        """Lifetimes in a forward-only program, instead of tensors that are saved for a backward; None in others."""

    @property
    def frees_gradients(self) -> bool:
        """True if gradients are freed in the backward; gradients of several micro-batches stay until the end."""
        return self.space.optimizer.frees_gradients and not self.microbatches.several

    def fetching_ahead(self, prefetch: int) -> MemoryModel:
        """Return the same model of plans that fetch weights so many layers ahead; it shares all arrays."""
        other = copy.copy(self)
        other.prefetch = prefetch
        return other

    def on(self, space: Space) -> MemoryModel:
        """Return the same model on another space of the same calls; with all arrays if only moves cost otherwise."""
        found = MemoryModel(space, self.microbatches, self.prefetch, lifetimes=self.lifetimes)
        if space.moves_alike(self.space) and not self.accumulation.may_reduce_each:
            found._cache, found._edges, found.parts = self._cache, self._edges, self.parts
        return found

    def widened(self) -> MemoryModel:
        """Return the same model on the space before it was narrowed."""
        return self if self.space.kept is None else self.on(self.space.widened()[0])

    # Permanently resident bytes.

    def stored(self, number: int) -> dict[str, Bytes]:
        """Return the bytes of a parameter, buffer or input by what they are; the arrays have one entry per strategy."""
        decision, more = self.space.decisions[number], self.accumulation
        if decision.kind not in ("parameter", "buffer", "input") or more.is_received(number):
            return {}
        elements = self.elements(info := decision.node.meta["tensor"], decision)
        if decision.kind != "parameter":
            return {"buffers and inputs": self.times(elements, info.dtype.itemsize * more.arrives(number))}
        on_device = self.space.optimizer.offload is None
        saved_bytes = self.optimizer_state(info, elements, self.space.is_matrix(number)) if on_device else {}
        values = self.times(elements, info.dtype.itemsize)
        older = {"older weights": values} if self.microbatches.saves_older and info.requires_grad else {}
        return {"parameters": values, **older, **saved_bytes}

    def works_on(self, number: int) -> Bytes | None:
        """Return the bytes that the optimizer's step of a parameter works on; None if no moment is counted for it."""
        if number not in self.stepping:
            return None
        shape, most = (len(self.space.decisions[number].candidates.strategies),), self.stepping[number]
        return self.cached(("works on", shape, most), lambda: np.full(shape, most, dtype=np.int64))

    def _stepping(self) -> dict[int, int]:
        space = self.space
        working = {
            number: step_working_bytes(decision.node.meta["tensor"], space.optimizer, True)
            for number, decision in enumerate(space.decisions)
            if decision.kind == "parameter" and space.is_matrix(number) and space.program.learns
        }
        most = sorted(working, key=working.__getitem__)[-1:]
        return working if space.optimizer.in_backward else {number: working[number] for number in most}

    # Bytes saved between forward and backward.

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
        besides = saved.other_bytes or self.states("saved_bytes", decision)
        if not any(outputs or (hidden and besides) for outputs, hidden in states):
            return None
        arrays = tuple(self._own(decision, saved, *state, mode) for mode, state in enumerate(states))
        talking = self.second_forward.communicates(decision)
        if talking.any():  # a call that communicates by itself runs again in the mode full alone: else its results stay
            given = self._own(decision, saved, outputs, True)
            held = [given if decision.node in e.rerun else array for e, array in zip(again, arrays, strict=True)]
            held[FULL_MODE : FULL_MODE + 1] = arrays[FULL_MODE : FULL_MODE + 1]
            if len(again) == len(MODES):  # its saved tensors are offloaded like all others
                held[-1] = arrays[-1]
            key = ("talks", id(decision.candidates), tuple(map(id, (*arrays, *held))))
            arrays = tuple(
                self.cached((key, i), lambda a=array, h=held[i]: np.where(talking, h, a)) if i else array
                for i, array in enumerate(arrays)
            )
        return self.modes(arrays)

    def _own(self, decision: Decision, saved: Saved, outputs: frozenset[int], hidden: bool, mode: int = 0) -> Bytes:
        outputs, mode = outputs - saved.aliases, self.second_forward.variant(decision, mode) if hidden else 0
        hides = hidden and self.states("saved_bytes", decision)
        key = ("own", id(decision.candidates), outputs, saved.other_bytes if hidden else 0, hides, mode)
        return self.cached(key, lambda: self._own_bytes(decision, outputs, hidden, mode))

    def _own_bytes(self, decision: Decision, outputs: frozenset[int], hidden: bool, mode: int) -> Bytes:
        call, candidates = _call(decision), decision.candidates
        total = np.zeros(len(candidates.strategies), dtype=np.int64)
        for position in outputs:
            info = call.outputs[position]
            layouts = [s.outputs[position] for s in candidates.strategies]
            total = total + self.local(info.shape, layouts, info.dtype.itemsize)
        return total + self._hidden(decision, mode) if hidden else total

    def _hidden(self, decision: Decision, mode: int) -> Bytes:
        """Return the bytes that a call saves besides inputs and outputs: split as the largest input that can be."""
        call, strategies = _call(decision), self.second_forward.running_in(decision, mode)
        if not call.inputs or not (self.lifetimes.saved(decision).other_bytes or self.states("saved_bytes", decision)):
            return np.zeros(len(strategies), dtype=np.int64)
        largest = largest_split_input(call, decision.candidates.bound)
        local = self.local(call.inputs[largest].shape, [s.inputs[largest] for s in strategies], 1)
        return stated_or(self.stated("saved_bytes", decision, mode), self.hidden(decision, largest, local))

    def hidden(self, decision: Decision, largest: int, local: Bytes) -> Bytes:
        """Return the bytes that autograd saves besides inputs and outputs, by local elements of the largest input."""
        whole = _call(decision).inputs[largest].num_elements
        return np.ceil(self.lifetimes.saved(decision).other_bytes * (local / max(whole, 1))).astype(np.int64)

    def edge(self, edge: TensorEdge) -> Modes | None:
        """Return the bytes of a tensor on account of an edge, by mode and strategies at its ends; None: no bytes."""
        if self.accumulation.holds(edge):
            return None
        if edge.end not in self._edges:
            alike = self.space.kind(edge), self.lifetimes.needs_of(edge)
            if alike not in self._edges:
                self._edges[alike] = self._edge(edge)
            self._edges[edge.end] = self._edges[alike]
        return self._edges[edge.end]

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
                found.append(self.saved(edge, True) if needed else None)
            elif not needed and not self.lifetimes.reruns(edge.target, mode):
                found.append(None)
            elif inside:
                found.append(self._sent_once(edge, again, self.lifetimes.counts_source(edge, mode)))
            else:
                is_counted = self.lifetimes.counts_before(edge) or (source.kind in ("input", "buffer") and there)
                found.append(self._entering(edge, is_counted, again))
        if all(each is None for each in found):
            return None
        nothing = self.nothing((len(source.candidates.strategies), len(target.candidates.strategies)))
        return self.modes([nothing if each is None else each for each in found])

    def _sent_once(self, edge: TensorEdge, again: np.ndarray | None, alone: bool) -> Bytes:
        """Return the bytes that a segment saves of a tensor that it has sent itself; none if the collectives run
        `again`.

        `alone`: the tensor is a saved result that no other edge needs; it counts here if it is not sent.
        """
        sent, before = self.sent(edge), self.bytes_at_ends(edge)[0][:, None] if alone else self.nothing(())
        if again is None and not alone:
            return sent
        unsent = ~self.communicated(edge) if again is None else ~self.communicated(edge) | again
        key = ("sent once", id(sent), id(again), alone)
        return self.cached(key, lambda: np.where(unsent, before, sent))

    def _entering(self, edge: TensorEdge, there: bool, again: np.ndarray | None) -> Bytes:
        """Return the bytes that a segment saves of a tensor from outside; as it was before the collectives that run
        `again`.
        """
        saved_bytes = self.saved(edge, there)
        if again is None:
            return saved_bytes
        before = self.nothing(()) if there else self.bytes_at_ends(edge)[0][:, None]
        return self.cached(("entering", id(saved_bytes), id(again)), lambda: np.where(again, before, saved_bytes))

    def _kept_by_target(self, edge: TensorEdge, there: bool) -> Bytes:
        """Return the bytes of a tensor saved as it arrives, by those strategies of its target that save it."""
        saved_bytes, candidates = self.saved(edge, there), self.space.decisions[edge.target].candidates
        bound, call = candidates.bound, candidates.call
        if self.space.decisions[edge.target].kind == "shared_reshard" and any(s.shared for s in candidates.strategies):
            shared = self.cached(
                ("shared", id(candidates)), lambda: np.array([s.shared for s in candidates.strategies])
            )
            return self.cached(
                ("moved together", id(saved_bytes), id(candidates)), lambda: np.where(shared[None, :], 0, saved_bytes)
            )
        if bound is None or call is None:
            return saved_bytes

        def lets_go(s: Strategy) -> bool:
            return s.implemented and edge.target_input in s.implementation.unkept(call, self.local_sizes(s, bound))

        key = "let go", id(candidates), edge.target_input
        let_go = self.cached(key, lambda: np.array([*map(lets_go, candidates.strategies)]))
        if not let_go.any():
            return saved_bytes
        key = ("saved by target", id(saved_bytes), id(candidates), edge.target_input)
        return self.cached(key, lambda: np.where(let_go[None, :], 0, saved_bytes))

    def working(self, number: int) -> Modes | None:
        """Return the working bytes of a call's backward, by mode: its outputs, gradients of all it takes and makes.

        That includes what it saves besides inputs and outputs, such as the probabilities of a loss. It excludes
        gradients that its forward has made.
        """
        decision = self.space.decisions[number]
        if decision.kind != "call" or self.lifetimes.saved(decision).aliases:
            return None
        key = ("working", id(decision.candidates), self.lifetimes.saved(decision).other_bytes)
        tensors = range(len(_call(decision).inputs)), range(len(_call(decision).outputs))
        modes = [self.second_forward.variant(decision, mode) for mode in range(self.lifetimes.num_modes(number))]
        return self.modes([self.cached((*key, m), lambda m=m: self._working(decision, *tensors, m)) for m in modes])

    def _working(self, decision: Decision, inputs: Collection[int], outputs: Collection[int], mode: int = 0) -> Bytes:
        """Return the bytes of some inputs' gradients, some outputs, and what is saved besides both."""
        call, strategies = _call(decision), self.second_forward.running_in(decision, mode)
        total = self._gradients_of(decision, inputs)
        for position in outputs:
            info = call.outputs[position]
            total = total + self.local(info.shape, [s.outputs[position] for s in strategies], info.dtype.itemsize)
        op, bound = decision.candidates.op, decision.candidates.bound
        hidden = self._hidden(decision, mode)
        if not self.lifetimes.in_place(decision):
            hidden = stated_or(self.stated("backward_bytes", decision, mode), hidden)
        hidden = np.where(self.stated("forward_bytes", decision, mode) == UNSTATED, hidden, 0)
        if op is not None and bound is not None and op.backward_bytes is not None:
            total = total + self.array([op.backward_bytes(call, self.local_sizes(s, bound)) for s in strategies])
        return total + hidden

    def working_forward(self, number: int) -> Bytes | None:
        """Return the bytes that a call's forward works on if it makes its gradients; None if it does not."""
        decision = self.space.decisions[number]
        if decision.candidates.bound is None or not self.states("forward_bytes", decision):
            return None
        stated = self.stated("forward_bytes", decision)
        return self.cached(("working forward", id(stated)), lambda: stated_or(stated, np.zeros_like(stated)))

    def handed_on(self, number: int) -> Bytes | None:
        """Return the bytes of gradients that a backward leaves for calls before it: of inputs that are no weights."""
        decision = self.space.decisions[number]
        if decision.kind != "call":
            return None
        call = _call(decision)
        inputs = frozenset(
            position
            for position, info in enumerate(call.inputs)
            if info.requires_grad and not self.space.is_weight(self.space.inbound[number, position].source)
        )
        return self.cached(("handed on", id(decision.candidates), inputs), lambda: self._gradients_of(decision, inputs))

    def working_rows(self, number: int) -> Bytes:
        """Return the part of `working` that is expert rows and their gradients."""
        decision, rows = self.space.decisions[number], self.space.rows[number]
        key = (
            "working rows",
            id(decision.candidates),
            rows.inputs,
            rows.outputs,
            self.lifetimes.saved(decision).other_bytes,
        )
        return self.cached(key, lambda: self._working(decision, rows.inputs, rows.outputs))

    def handed_on_rows(self, number: int) -> Bytes:
        """Return the part of `handed_on` that is gradients of expert rows."""
        decision, inputs = self.space.decisions[number], self.space.rows[number].inputs
        return self.cached(
            ("rows handed on", id(decision.candidates), inputs), lambda: self._gradients_of(decision, inputs)
        )

    def _gradients_of(self, decision: Decision, inputs: Collection[int]) -> Bytes:
        """Return the bytes of the gradients of those of these inputs that need one."""
        call, strategies = _call(decision), decision.candidates.strategies
        total = np.zeros(len(strategies), dtype=np.int64)
        for position, info in enumerate(call.inputs):
            if position not in inputs or not info.requires_grad:
                continue
            total = total + self.local(info.shape, [s.inputs[position] for s in strategies], info.dtype.itemsize)
        return total

    def total(self, moments: Sequence[tuple[int, Sequence[Modes]]]) -> Modes | None:
        """Return the total of arrays of this model over several moments, mode by mode; None if no moment has arrays.

        Each moment is (weight, arrays that add up), and counts by its weight.
        """
        count = max((len(modes) for _, parts in moments for modes in parts), default=0)
        if not count:
            return None
        return tuple(
            self._combined([(weight, [m[i if len(m) > 1 else 0] for m in parts]) for weight, parts in moments])
            for i in range(count)
        )

    def _combined(self, moments: list[tuple[int, list[Bytes]]]) -> Bytes:
        filled = [(weight, parts) for weight, parts in moments if parts]
        if len(filled) == 1 and len(filled[0][1]) == 1 and filled[0][0] == 1:
            return filled[0][1][0]
        # The cache holds every array, so that an id names one array for good.
        key = ("total", tuple((weight, tuple(map(id, parts))) for weight, parts in filled))

        def combine() -> Bytes:
            return np.sum([weight * np.sum(parts, axis=0) for weight, parts in filled], axis=0)

        return self.cached(key, combine)


def _call(decision: Decision):
    call = decision.candidates.call
    assert call is not None, f"{decision.name} is no call"
    return call
