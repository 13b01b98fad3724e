"""What each choice holds in memory: bytes per device by decision and by wire.

A parameter holds itself, its gradient, its optimizer state and a master copy, in its storage layout. Between forward
and backward a call holds what autograd keeps for it (asked of autograd, see `saved`):

    its own outputs and hidden tensors    counted on the call
    its inputs                            counted on the wire, in the layout in which they arrive, unless the tensor is
                                          there anyway: not moved, and held by its producer, a parameter or an input

A view counts where its memory was made. What weights and their gradients take on their way, `moved_weights` says. Under
recomputation (`segments`) a segment holds only what its second run begins with: tensors from outside, results of
collectives and, if selective, of contractions.

All this is of one micro-batch; where a step has several, `accumulation` says what is held besides, and instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from torch import fx

from autopar.cost.messages import joined_layers
from autopar.memory.accumulation import Accumulation
from autopar.memory.microbatches import Microbatches
from autopar.memory.tensor_bytes import COMMUNICATED, SLICED, Bytes, Modes, TensorBytes
from autopar.memory.weights import MovedWeights
from autopar.program.recompute_segments import MODES, Recomputation, recomputation, segments_of
from autopar.program.saved_tensors import Saved, saved_in
from autopar.space.space import Decision, Space, Wire

LATE = 1 << 40  # the position of what no call uses


class MemoryModel(TensorBytes):
    """Bytes of every decision (one entry per strategy) and wire (a matrix over the strategies at its ends).

    Equal calls share their arrays, which must not be changed.
    """

    def __init__(self, space: Space, microbatches: Microbatches | None = None) -> None:
        super().__init__(space)
        self.microbatches = microbatches or Microbatches()
        self.calls = [n for n, decision in enumerate(space.decisions) if decision.kind == "call"]
        """The calls in the order they run."""
        self._outgoing: dict[int, list[Wire]] = defaultdict(list)
        for wire in space.wires:
            self._outgoing[wire.source].append(wire)
        self._needs: dict[tuple[int, int], bool] = {}
        self._wires: dict[tuple[int, int], Modes | None] = {}
        self._again: dict[str, dict[str, Recomputation]] = {}
        self._segment_of_node: dict[fx.Node, str] = {}
        self._saved_by_node = saved_in(space.program)
        for segment in segments_of(space.program):
            self._again[segment.name] = {mode: recomputation(space.program, segment, mode) for mode in MODES}
            self._segment_of_node.update(dict.fromkeys(segment.nodes, segment.name))
        self.segments = tuple(self._again)
        self.accumulation = Accumulation(self)
        self.weights = MovedWeights(self)

    # When.

    @cached_property
    def position(self) -> list[int]:
        """For each decision, where in the order of calls it is first used; a call's own place."""
        found = [LATE] * len(self.space.decisions)
        for place, number in enumerate(self.calls):
            found[number] = place
        for wire in reversed(self.space.wires):  # the wires that leave a hub lie behind the one that enters it
            if self.space.decisions[wire.source].kind != "call":
                found[wire.source] = min(found[wire.source], found[wire.target])
        return found

    @cached_property
    def segment(self) -> list[str]:
        """For each call and hub, the segment it is computed again with; "" for none."""
        return [
            self._segment_of_node.get(self._first_call(number).node, "") if d.kind in ("call", "hub") else ""
            for number, d in enumerate(self.space.decisions)
        ]

    @cached_property
    def layer(self) -> list[str]:
        """For each decision, the layer whose weights are gathered while it runs: of those in a message, the last."""
        joined = joined_layers(self.space.program)
        own = [self.segment[n] or _module(self._first_call(n).node) for n in range(len(self.space.decisions))]
        return [joined.get(layer, layer) for layer in own]

    def _first_call(self, number: int) -> Decision:
        """The call itself, or the first one that uses the decision."""
        place = self.position[number]
        return self.space.decisions[self.calls[place] if place < LATE else number]

    # What is held all the time.

    def stored(self, number: int) -> dict[str, Bytes]:
        """Bytes of a parameter, buffer or input by what they are; the arrays have one entry per strategy.

        Between stages of a pipeline there are buffers for what is received, also for gradients of what is sent.
        """
        decision, more = self.space.decisions[number], self.accumulation
        if decision.kind not in ("parameter", "buffer", "input") and not more.is_sent(number):
            return {}
        info = decision.node.meta["tensor"]
        elements = self.elements(info, decision)
        if decision.kind == "output":
            num_gradients = self.microbatches.count if info.requires_grad else 0
            return {"receive buffers": self.times(elements, info.dtype.itemsize * num_gradients)}
        if decision.kind != "parameter":
            name = "receive buffers" if more.is_received(number) else "buffers and inputs"
            return {name: self.times(elements, info.dtype.itemsize * more.arrives(number))}
        optimizer = self.space.optimizer
        each = {
            "parameters": info.dtype.itemsize,
            "optimizer": optimizer.state_bytes(info),
            "master copies": optimizer.master_bytes(info),
        }
        return {name: self.times(elements, size) for name, size in each.items() if size}

    def gradients(self, number: int) -> Bytes | None:
        """Bytes of a parameter's gradient, once it is reduced; None where there is none."""
        decision = self.space.decisions[number]
        info = decision.node.meta["tensor"]
        if decision.kind != "parameter" or not info.requires_grad:
            return None
        return self.times(self.elements(info, decision), info.dtype.itemsize)

    # What is held between forward and backward.

    def own(self, number: int) -> Modes | None:
        """Bytes that a call keeps of its own outputs and hidden tensors, by mode; None where it keeps nothing."""
        decision = self.space.decisions[number]
        if decision.kind != "call":
            return None
        saved, again = self.saved(decision), self._recomputations(number)
        outputs = frozenset(range(len(_call(decision).outputs)))
        states: list[tuple[frozenset[int], bool]] = [(saved.outputs, True)]
        for each in again[1:]:
            if decision.node in each.rerun:
                states.append((frozenset(), False))
            elif decision.node in each.kept:
                states.append((outputs, True))
            else:
                states.append((saved.outputs, True))
        if not any(outputs or (hidden and saved.other_bytes) for outputs, hidden in states):
            return None
        arrays = tuple(self._own(decision, saved, *state) for state in states)
        talking = self._talks(decision)
        if talking.any():  # a call that communicates by itself is never run again
            key = ("talks", id(decision.menu), tuple(map(id, arrays)))
            arrays = tuple(
                self.cached((key, i), lambda a=array: np.where(talking, arrays[0], a)) if i else array
                for i, array in enumerate(arrays)
            )
        return self.modes(arrays)

    def _talks(self, decision: Decision) -> np.ndarray:
        """Which strategies of a call run collectives of their own in the forward."""
        strategies = decision.menu.strategies
        return self.cached(
            ("talking", id(decision.menu)),
            lambda: np.array([any(not t.backward for t in s.transfers) for s in strategies]),
        )

    def _own(self, decision: Decision, saved: Saved, outputs: frozenset[int], hidden: bool) -> Bytes:
        outputs = outputs - saved.aliases
        key = ("own", id(decision.menu), outputs, saved.other_bytes if hidden else 0)
        return self.cached(key, lambda: self._own_bytes(decision, outputs, hidden))

    def _own_bytes(self, decision: Decision, outputs: frozenset[int], hidden: bool) -> Bytes:
        call, menu = _call(decision), decision.menu
        total = np.zeros(len(menu.strategies), dtype=np.int64)
        for position in outputs:
            info = call.outputs[position]
            total += self.local(info.shape, [s.outputs[position] for s in menu.strategies], info.dtype.itemsize)
        return total + self._hidden(decision) if hidden else total

    def _hidden(self, decision: Decision) -> Bytes:
        """Bytes of what a call keeps beside its inputs and outputs: split as its largest input is."""
        call, strategies, other = _call(decision), decision.menu.strategies, self.saved(decision).other_bytes
        if not other or not call.inputs:
            return np.zeros(len(strategies), dtype=np.int64)
        largest = max(range(len(call.inputs)), key=lambda i: call.inputs[i].num_elements)
        info = call.inputs[largest]
        local = self.local(info.shape, [s.inputs[largest] for s in strategies], 1)
        return np.ceil(other * (local / max(info.num_elements, 1))).astype(np.int64)

    def wire(self, wire: Wire) -> Modes | None:
        """Bytes that a tensor takes on account of a wire, by mode and strategies at its ends; None where none."""
        end = wire.target, wire.target_input
        if end not in self._wires:
            self._wires[end] = None if self.accumulation.holds(wire) else self._wire(wire)
        return self._wires[end]

    def _wire(self, wire: Wire) -> Modes | None:
        source, target = self.space.decisions[wire.source], self.space.decisions[wire.target]
        if target.kind == "output":
            return None
        needed = self._input_needed(wire)
        there = self._there_anyway(wire)
        states = [("kept", there) if needed else None]
        again = self._recomputations(wire.target)
        inside = self.segment[wire.source] == self.segment[wire.target]
        for mode in range(1, len(again)):
            active = needed or self._rerun(wire.target, mode)
            if self.space.is_weight(wire.source):
                states.append(("kept", True) if needed else None)  # a cast that stays where it is is made again
            elif not active:
                states.append(None)
            else:
                persistent = source.kind in ("input", "buffer") and there
                states.append(("moved", True) if inside else ("kept", persistent))
        if not any(states):
            return None
        return self.modes([self._matrix(wire, state) for state in states])

    def _matrix(self, wire: Wire, state: tuple[str, bool] | None) -> Bytes:
        if state is None:
            shape = tuple(len(self.space.decisions[end].menu.strategies) for end in (wire.source, wire.target))
            return self.nothing(shape)
        return self.cached(("wire", state, self.space.kind(wire)), lambda: self._wire_bytes(wire, *state))

    def _wire_bytes(self, wire: Wire, what: str, there: bool) -> Bytes:
        kinds = self.kinds(wire)
        before, after = self.wire_ends(wire)
        if what == "moved":  # the second run makes the rest again
            return np.where(kinds == COMMUNICATED, after[None, :], 0)
        unmoved = np.zeros_like(before) if there else before
        found = np.where(kinds <= SLICED, unmoved[:, None], after[None, :])
        strategies = self.space.decisions[wire.source].menu.strategies
        if wire.tensor.regather and any(strategy.kept for strategy in strategies):
            again = np.array([not strategy.kept for strategy in strategies])
            found[again[:, None] & self.only_gathers(wire)] = 0
        return found

    def kept(self, wire: Wire, there: bool) -> Bytes:
        """Bytes of a tensor that is kept as it arrives; where it is not moved, it may be `there` anyway."""
        return self._matrix(wire, ("kept", there))

    def working(self, number: int) -> Bytes | None:
        """Bytes that a call works on while it runs backward: its outputs, and gradients of all that it takes and makes.

        That includes what it keeps beside inputs and outputs, as the probabilities of a loss.
        """
        decision = self.space.decisions[number]
        if decision.kind != "call" or self.saved(decision).aliases:
            return None
        key = ("working", id(decision.menu), self.saved(decision).other_bytes)
        return self.cached(key, lambda: self._working(decision))

    def _working(self, decision: Decision) -> Bytes:
        call, strategies = _call(decision), decision.menu.strategies
        total = self._gradients_of(decision, (i for i, info in enumerate(call.inputs) if info.requires_grad))
        for position, info in enumerate(call.outputs):
            total += self.local(info.shape, [s.outputs[position] for s in strategies], info.dtype.itemsize)
        return total + self._hidden(decision)

    def handed_on(self, number: int) -> Bytes | None:
        """Bytes of the gradients that a call's backward leaves for calls before it: of inputs that are no weights."""
        decision = self.space.decisions[number]
        if decision.kind != "call":
            return None
        call = _call(decision)
        inputs = frozenset(
            position
            for position, info in enumerate(call.inputs)
            if info.requires_grad and not self.space.is_weight(self.space.inbound[number, position].source)
        )
        return self.cached(("handed on", id(decision.menu), inputs), lambda: self._gradients_of(decision, inputs))

    def _gradients_of(self, decision: Decision, inputs: Iterable[int]) -> Bytes:
        call, strategies = _call(decision), decision.menu.strategies
        total = np.zeros(len(strategies), dtype=np.int64)
        for position in inputs:
            info = call.inputs[position]
            total += self.local(info.shape, [s.inputs[position] for s in strategies], info.dtype.itemsize)
        return total

    def recompute_seconds(self, number: int) -> Modes | None:
        """Seconds of a call's second forward, by mode; None where it has none in any mode."""
        decision = self.space.decisions[number]
        if decision.kind != "call" or not self.segment[number]:
            return None
        forward = decision.menu.forward_seconds
        nothing = self.cached(("no seconds", len(forward)), lambda: np.zeros(len(forward)))
        again = self._recomputations(number)
        if not any(decision.node in each.rerun for each in again):
            return None
        key = ("second forward", id(decision.menu))
        second = self.cached(key, lambda: np.where(self._talks(decision), 0.0, forward))
        return tuple(second if decision.node in each.rerun else nothing for each in again)

    def total(self, moments: Sequence[tuple[int, Sequence[Modes]]], worst: bool) -> Modes | None:
        """What arrays of this model come to over several moments, each (weight, arrays that add up), mode by mode.

        Moments are added up by weight, or (`worst`) the largest is taken entry by entry. None where there is nothing.
        """
        count = max((len(modes) for _, parts in moments for modes in parts), default=0)
        if not count:
            return None
        return tuple(
            self._combined([(weight, [m[i if len(m) > 1 else 0] for m in parts]) for weight, parts in moments], worst)
            for i in range(count)
        )

    def _combined(self, moments: list[tuple[int, list[Bytes]]], worst: bool) -> Bytes:
        filled = [(weight, parts) for weight, parts in moments if parts]
        if len(filled) == 1 and len(filled[0][1]) == 1 and (worst or filled[0][0] == 1):
            return filled[0][1][0]
        # The cache holds every array, so that an id names one array for good.
        key = ("total", worst, tuple((weight, tuple(map(id, parts))) for weight, parts in filled))

        def combine() -> Bytes:
            sums = [(1 if worst else weight) * np.sum(parts, axis=0) for weight, parts in filled]
            return np.max(sums, axis=0) if worst else np.sum(sums, axis=0)

        return self.cached(key, combine)

    # Who needs what.

    def _recomputations(self, number: int) -> tuple[Recomputation, ...]:
        name = self.segment[number]
        return tuple(self._again[name].values()) if name else (Recomputation(frozenset(), frozenset()),)

    def num_modes(self, number: int) -> int:
        """How many modes of recomputation a decision's segment has: one where it has no segment."""
        return len(self._recomputations(number))

    def keeps_output(self, number: int, output: int, mode: int) -> bool:
        """Whether an output of a decision is kept as it is for some backward, in a mode, or what is sent is a copy."""
        decision = self.space.decisions[number]
        if decision.node.op == "placeholder" or (mode > 0 and self._rerun(number, mode)):
            return False
        saved = self.saved(decision)
        if output in saved.aliases:
            return False
        return (decision.kind == "call" and output in saved.outputs) or self._output_needed(number, output)

    def _rerun(self, number: int, mode: int) -> bool:
        """Whether a call, or a consumer of a hub, is run again in a mode."""
        decision = self.space.decisions[number]
        if decision.kind == "hub":
            return any(self._rerun(wire.target, mode) for wire in self._outgoing[number])
        if decision.kind != "call" or not self.segment[number]:
            return False
        return decision.node in self._recomputations(number)[mode].rerun

    def _input_needed(self, wire: Wire) -> bool:
        """Whether the backward of the wire's target, or of what lies behind a view or hub, needs the tensor."""
        target = self.space.decisions[wire.target]
        if target.kind == "output":
            return False
        if target.kind == "hub":
            return self._output_needed(wire.target, 0)
        if wire.target_input in self.saved(target).inputs:
            return True
        return bool(self.saved(target).aliases) and self._output_needed(wire.target, 0)

    def _output_needed(self, number: int, output: int) -> bool:
        if (number, output) not in self._needs:
            wires = (wire for wire in self._outgoing[number] if wire.source_output == output)
            self._needs[number, output] = any(map(self._input_needed, wires))
        return self._needs[number, output]

    def _there_anyway(self, wire: Wire) -> bool:
        """Whether the tensor that leaves the source is held on account of something else."""
        source = self.space.decisions[wire.source]
        if source.kind != "call":
            return True  # parameters and inputs are always held, and a hub's tensor is counted where it enters
        saved = self.saved(source)
        return wire.source_output in saved.aliases or wire.source_output in saved.outputs

    def saved(self, decision: Decision) -> Saved:
        """What autograd keeps of a call."""
        return self._saved_by_node[decision.node]


def _call(decision: Decision):
    call = decision.menu.call
    assert call is not None, f"{decision.name} is no call"
    return call


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module", ""))
