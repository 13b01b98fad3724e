"""Memory model: bytes per device of each choice, by decision and by edge.

A parameter holds itself and its gradient in its storage layout, and its optimizer state and master copy unless these
are on the host. Between forward and backward a call holds the tensors that autograd saves for it (queried from
autograd, see `ir.program.saved_tensors`):

    its own outputs and hidden tensors    counted on the call
    its inputs                            counted on the edge, in the layout in which they arrive, unless the tensor is
                                          there anyway: not moved, and saved by its producer, a parameter or an input

Views count where their memory was made. `resident_parts` adds weights and their gradients in transit. Under
recomputation (`ir.program.recompute_segments`) a segment holds only what its second run begins with (`second_forward`):
tensors from outside, results of collectives unless these run again, and, if selective, results of products. A segment
saves its offloaded tensors (`host_copies`) on the device while it runs, and while the calls after it do, up to the next
segment. A program without gradients saves nothing; `live` says what is alive in it.

All this is for one micro-batch. If a step has several, `accumulation` says what is resident in addition, and instead.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.costs.memory.accumulation import Accumulation
from autopar.costs.memory.host_copies import HostCopies
from autopar.costs.memory.lifetimes import Lifetimes, Place
from autopar.costs.memory.live import Live
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.second_forward import FULL_MODE, SecondForward
from autopar.costs.memory.tensor_bytes import UNSTATED, Bytes, Modes, TensorBytes, shared, stated_or
from autopar.costs.pricing.optimizer_step import step_working_bytes
from autopar.costs.space.space import Decision, Space, TensorEdge
from autopar.ir.program.recompute_segments import MODES, OFFLOAD, RECOMPUTATIONS
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
        super().__init__(space, lifetimes or Lifetimes(space, MODES if offloads else RECOMPUTATIONS))
        self.stepping = self._stepping()
        """Parameter → working bytes of its step, besides what it updates: in the backward, or the most behind it."""
        works = bool(self.stepping) and not space.optimizer.in_backward
        self.microbatches = replace(microbatches or Microbatches(), works=works)
        self.prefetch = prefetch
        """Number of layers ahead of their use that weights are fetched."""
        self._edges: dict[object, Modes | None] = {}  # by end
        self.host_copies = HostCopies(self, self.saved_by, lambda: self.widened().host_copies)
        self.second_forward = SecondForward(self, self.host_copies)
        self.accumulation = Accumulation(self, self.microbatches)
        self.live = None if space.program.learns or self.microbatches.several else Live(self)
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
            found._cache, found._edges = self._cache, self._edges
        return found

    def widened(self) -> MemoryModel:
        """Return the same model on the space before it was narrowed."""
        return self if self.space.kept is None else self.on(self.space.widened()[0])

    # Permanently resident bytes.

    def stored(self, number: int) -> dict[str, Bytes]:
        """Return the bytes of a parameter, buffer or input by what they are; the arrays have one entry per strategy."""
        decision, runs = self.space.decisions[number], self.microbatches
        if decision.kind not in ("parameter", "buffer", "input") or self.accumulation.is_received(number):
            return {}
        found = self.whole(decision)
        if decision.kind != "parameter":  # the inputs of all micro-batches are there
            return {"buffers and inputs": self.times(found, runs.count if decision.kind == "input" else 1)}
        older = {"older weights": found} if runs.saves_older and decision.node.meta["tensor"].requires_grad else {}
        on_device = self.space.optimizer.offload is None
        return {"parameters": found, **older, **(self.optimizer_state(number) if on_device else {})}

    def works_on(self, number: int) -> Bytes | None:
        """Return the bytes that the optimizer's step of a parameter works on; None if no moment is counted for it."""
        if number not in self.stepping:
            return None
        nothing = self.nothing((len(self.space.decisions[number].candidates.strategies),))
        return self.cached(("works on", id(nothing), self.stepping[number]), lambda: nothing + self.stepping[number])

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

    def saved_by(self, place: Place) -> Modes | None:
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
        hides = bool(saved.other_bytes or self.states("saved_bytes", decision))

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
        return self.modes(arrays)

    @shared
    def _chosen(self, mask: np.ndarray, one: Bytes, other: Bytes) -> Bytes:
        return np.where(mask, one, other)

    @shared
    def _own(self, decision: Decision, outputs: frozenset[int], other_bytes: int, mode: int) -> Bytes:
        return self._outputs(decision, outputs, 0) + self._hidden(decision, other_bytes, mode)

    @shared
    def _outputs(self, decision: Decision, outputs: frozenset[int], mode: int) -> Bytes:
        strategies = self.second_forward.running_in(decision, mode)
        total = self.nothing((len(strategies),))
        for position in outputs:
            info = _call(decision).outputs[position]
            total = total + self.local(info.shape, [s.outputs[position] for s in strategies], info.dtype.itemsize)
        return total

    @shared
    def _hidden(self, decision: Decision, other_bytes: int, mode: int) -> Bytes:
        """Return the bytes that a call saves besides inputs and outputs: split as the largest input that can be.

        Autograd saves `other_bytes` for the whole call; implementations may state others.
        """
        call, strategies = _call(decision), self.second_forward.running_in(decision, mode)
        if not call.inputs or not (other_bytes or self.states("saved_bytes", decision)):
            return self.nothing((len(strategies),))
        largest = largest_split_input(call, decision.candidates.bound)
        local = self.local(call.inputs[largest].shape, [s.inputs[largest] for s in strategies], 1)
        return stated_or(self.stated("saved_bytes", decision, mode), self.hidden(decision, other_bytes, largest, local))

    def hidden(self, decision: Decision, other_bytes: int, largest: int, local: Bytes) -> Bytes:
        """Return the bytes of a call's `other_bytes`, by local elements of the largest input."""
        whole = _call(decision).inputs[largest].num_elements
        return np.ceil(other_bytes * (local / max(whole, 1))).astype(np.int64)

    def edge(self, edge: TensorEdge) -> Modes | None:
        """Return the bytes of a tensor on account of an edge, by mode and strategies at its ends; None: no bytes."""
        if self.accumulation.holds(edge):
            return None
        if edge.end not in self._edges:
            alike = self.space.kind(edge), self.lifetimes.needs_of(edge)
            self._edges[edge.end] = self.cached(("saved on", alike), lambda: self._edge(edge))
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
        sent = self.sent(edge)
        return sent if again is None and not alone else self._sent_or_made(edge, again, alone)

    @shared
    def _sent_or_made(self, edge: TensorEdge, again: np.ndarray | None, alone: bool) -> Bytes:
        unsent = ~self.communicated(edge) if again is None else ~self.communicated(edge) | again
        return np.where(unsent, self.bytes_at_ends(edge)[0][:, None] if alone else 0, self.sent(edge))

    @shared
    def _entering(self, edge: TensorEdge, there: bool, again: np.ndarray | None) -> Bytes:
        """Return the bytes that a segment saves of a tensor from outside; as it was before the collectives that run
        `again`.
        """
        saved_bytes = self.saved(edge, there)
        if again is None:
            return saved_bytes
        return np.where(again, 0 if there else self.bytes_at_ends(edge)[0][:, None], saved_bytes)

    @shared
    def _kept_by_target(self, edge: TensorEdge, there: bool) -> Bytes:
        """Return the bytes of a tensor saved as it arrives, by those strategies of its target that save it."""
        saved_bytes, target = self.saved(edge, there), self.space.decisions[edge.target]
        candidates = target.candidates
        if target.kind == "shared_reshard":
            lets_go = [each.shared for each in candidates.strategies]
        elif candidates.bound is None or candidates.call is None:
            return saved_bytes
        else:
            lets_go = [
                each.implemented
                and edge.target_input
                in each.implementation.unkept(candidates.call, self.local_sizes(each, candidates.bound))
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
        return self.modes([self._working(decision, *tensors, other_bytes, mode) for mode in modes])

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
            hidden = stated_or(self.stated("backward_bytes", decision, mode), hidden)
        hidden = np.where(self.stated("forward_bytes", decision, mode) == UNSTATED, hidden, 0)
        if op is not None and bound is not None and op.backward_bytes is not None:
            total = total + self.array([op.backward_bytes(call, self.local_sizes(s, bound)) for s in strategies])
        return total + hidden

    def working_forward(self, number: int) -> Bytes | None:
        """Return the bytes that a call's forward works on if it makes its gradients; None if it does not."""
        decision = self.space.decisions[number]
        makes = decision.candidates.bound is not None and self.states("forward_bytes", decision)
        return self._stated_alone(decision) if makes else None

    @shared
    def _stated_alone(self, decision: Decision) -> Bytes:
        stated = self.stated("forward_bytes", decision)
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
        total = self.nothing((len(strategies),))
        for position, info in enumerate(_call(decision).inputs):
            if position in inputs and info.requires_grad:
                total = total + self.local(info.shape, [s.inputs[position] for s in strategies], info.dtype.itemsize)
        return total

    def with_rerun(self, saved: Modes) -> Modes:
        """Return the bytes by mode while a segment itself runs again: what it saves, and all that it makes again."""
        return self.modes([each if each is saved[0] else self._greater(saved[0], each) for each in saved])

    @shared
    def _greater(self, one: Bytes, other: Bytes) -> Bytes:
        return np.maximum(one, other)

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
        return self.cached(key, lambda: np.sum([weight * np.sum(parts, axis=0) for weight, parts in filled], axis=0))


def _call(decision: Decision):
    call = decision.candidates.call
    assert call is not None, f"{decision.name} is no call"
    return call
