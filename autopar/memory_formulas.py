"""What fills a device at the peak of a plan, in symbols: the tensors of `memory` and `peak`, at the same moment.

    memory                     bytes per device, while the call runs (forward or backward) at which they are most now
    memory/activations, …      its parts, as `Plan.memory` names them

At other sizes another moment may be the fullest.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction

from autopar.hidden_bytes import hidden_bytes
from autopar.layout import Layout
from autopar.local_sizes import LocalSizes
from autopar.memory import SLICED, MemoryModel
from autopar.peak import memory_use
from autopar.plan import Instant
from autopar.repetition import Repetition
from autopar.segments import MODES
from autopar.space import Wire
from autopar.symbolic_shapes import input_keys
from autopar.symbols import Polynomial, Size


def memory_formulas(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], sizes: LocalSizes, repetition: Repetition
) -> dict[str, str]:
    """Name → formula, at the fullest moment of a choice per decision; none for stages and several micro-batches."""
    if not memory.calls or memory.microbatches.several or memory.space.program.num_sent:
        return {}
    place, backward = _fullest(memory, memory_use(memory, choices, modes)[1].timeline)
    parts = _Moment(memory, choices, modes, sizes, repetition, place, backward).parts()
    return {"memory": str(Polynomial.sum(parts.values())), **{f"memory/{name}": str(p) for name, p in parts.items()}}


def mode_of(memory: MemoryModel, number: int, modes: Mapping[str, str], count: int) -> int:
    """Which of `count` arrays by mode is that of a decision."""
    return MODES.index(modes.get(memory.segment[number], MODES[0])) if count > 1 else 0


def _fullest(memory: MemoryModel, timeline: Sequence[Instant]) -> tuple[int, bool]:
    """The place of the call at which most is held, and whether it runs backward."""
    count = len(memory.calls)
    forward = [instant.num_bytes for instant in timeline[:count]]
    backward = [instant.num_bytes for instant in reversed(timeline[count:])]
    most = max(backward) >= max(forward)
    return (backward.index(max(backward)), True) if most else (forward.index(max(forward)), False)


class _Moment:
    """The tensors that a device holds while one call runs."""

    def __init__(
        self,
        memory: MemoryModel,
        choices: Sequence[int],
        modes: Mapping[str, str],
        sizes: LocalSizes,
        repetition: Repetition,
        place: int,
        backward: bool,
    ) -> None:
        self.memory, self.space, self.choices, self.modes = memory, memory.space, choices, modes
        self.sizes, self.repetition, self.place, self.backward = sizes, repetition, place, backward
        self._found: Counter[tuple[str, Polynomial, Polynomial]] = Counter()
        self._elements: dict[tuple[int, Layout], Size] = {}
        self._hidden_bytes: dict[Hashable, Size] = {}

    def parts(self) -> dict[str, Polynomial]:
        """The bytes, by what they are."""
        for number, decision in enumerate(self.space.decisions):
            if decision.kind == "call":
                self._call(number)
            elif decision.kind != "hub":
                self._stored(number)
        for wire in self.space.wires:
            self._wire(wire)
        parts: dict[str, list[Polynomial]] = defaultdict(list)
        for (name, num_bytes, count), times in self._found.items():
            parts[name].append(num_bytes * count * times)
        return {name: Polynomial.sum(each) for name, each in parts.items()}

    def _add(self, name: str, num_bytes: Size | Polynomial, count: Polynomial) -> None:
        self._found[name, Polynomial.of(num_bytes), count] += 1

    def _local(self, shape: tuple[int, ...], layout: Layout) -> Size:
        key = (id(shape), layout)
        if key not in self._elements:
            self._elements[key] = self.sizes.local(shape, layout)
        return self._elements[key]

    def _stored(self, number: int) -> None:
        """A parameter, input or buffer, and its gradient once that is reduced."""
        decision, choice, count = (
            self.space.decisions[number],
            self.choices[number],
            self.repetition.of_decision(number),
        )
        held = dict(self.memory.stored(number))
        gradients = self.memory.gradients(number)
        if gradients is not None and self.backward and self.memory.position[number] > self.place:
            held["gradients"] = gradients
        for name, array in held.items():
            layout = decision.menu.strategies[choice].outputs[0]
            elements = self._local(self.sizes.shape((decision.node.name, 0)), layout)
            if elements:
                self._add(name, elements.polynomial * Fraction(int(array[choice]), int(elements)), count)

    def _call(self, number: int) -> None:
        """What a call keeps, and what it works on if it is the one that runs."""
        decision, choice, count = (
            self.space.decisions[number],
            self.choices[number],
            self.repetition.of_decision(number),
        )
        place, own = self.memory.position[number], self.memory.own(number)
        if own is not None and place <= self.place:
            kept = int(own[self._mode(number, len(own))][choice])
            if kept:
                self._add("activations", self._kept(number, kept), count)
        if place == self.place and self.backward and self.memory.working(number) is not None:
            strategy, call = decision.menu.strategies[choice], decision.menu.call
            assert call is not None
            read = zip(input_keys(self.space, decision), call.inputs, strategy.inputs, strict=True)
            made = (((decision.name, i), info, strategy.outputs[i]) for i, info in enumerate(call.outputs))
            for key, info, layout in (*(each for each in read if each[1].requires_grad), *made):
                self._add("working set", self._local(self.sizes.shape(key), layout) * info.dtype.itemsize, count)

    def _mode(self, number: int, count: int) -> int:
        """A segment that is computed again holds all of its own while it is."""
        again = self.backward and self.memory.segment[number] == self.memory.segment[self.memory.calls[self.place]]
        return 0 if again else mode_of(self.memory, number, self.modes, count)

    def _kept(self, number: int, kept: int) -> Size:
        """Outputs and hidden tensors that make this many bytes."""
        decision, strategy = self.space.decisions[number], self.space.decisions[number].menu.strategies
        call, layouts = decision.menu.call, strategy[self.choices[number]].outputs
        assert call is not None
        saved = self.memory.saved(decision)
        outputs = [
            self._local(self.sizes.shape((decision.name, i)), layout) * info.dtype.itemsize
            for i, (info, layout) in enumerate(zip(call.outputs, layouts, strict=True))
        ]
        hidden = self._hidden(number, saved.other_bytes)
        for positions in (saved.outputs, range(len(outputs))):
            found = Size.of(sum((outputs[i] for i in positions), hidden))
            if found == kept:
                return found
        raise AssertionError(f"{decision.name} keeps {kept} bytes, which are not its outputs and hidden tensors")

    def _hidden(self, number: int, num_bytes: int) -> Size:
        """Bytes per device of what autograd keeps beside inputs and outputs, split as the largest input is."""
        decision = self.space.decisions[number]
        call, strategy = decision.menu.call, decision.menu.strategies[self.choices[number]]
        if not num_bytes or call is None or not call.inputs:
            return Size.of(0)
        largest = max(range(len(call.inputs)), key=lambda i: call.inputs[i].num_elements)
        shapes = tuple(self.sizes.shape(key) for key in input_keys(self.space, decision))
        key = (id(decision.menu), num_bytes, *map(id, shapes))
        if key not in self._hidden_bytes:
            self._hidden_bytes[key] = hidden_bytes(decision, call, shapes, num_bytes, self.sizes.symbols)
        elements = Size.of(math.prod(shapes[largest]))
        return -(-self._hidden_bytes[key] * self._local(shapes[largest], strategy.inputs[largest]) // elements)

    def _wire(self, wire: Wire) -> None:
        """A tensor that is kept for its consumer, a weight that is gathered, and a gradient that is to be reduced."""
        memory, count = self.memory, self.repetition.of_wire(wire)
        ends, place = (self.choices[wire.source], self.choices[wire.target]), memory.position[wire.target]
        if place >= len(memory.calls):
            return
        source, target = (self.space.decisions[n].menu.strategies[self.choices[n]] for n in (wire.source, wire.target))
        kept, gathered, unreduced = memory.wire(wire), memory.gathered(wire), memory.unreduced(wire)
        shape, itemsize = self.sizes.of_wire(wire), wire.tensor.dtype.itemsize
        if kept is not None and place <= self.place and kept[self._mode(wire.target, len(kept))][ends]:
            unmoved = memory.kinds(wire)[ends] <= SLICED
            layout = source.outputs[wire.source_output] if unmoved else target.inputs[wire.target_input]
            self._add("activations", self._local(shape, layout) * itemsize, count)
        if memory.layer[wire.target] == memory.layer[memory.calls[self.place]]:
            whole = self._local(shape, target.inputs[wire.target_input]) * itemsize
            if gathered is not None and gathered[ends]:
                self._add("gathered weights", whole, count)
            if unreduced is not None and unreduced[ends] and self.backward and place >= self.place:
                self._add("gradients", whole, count)
