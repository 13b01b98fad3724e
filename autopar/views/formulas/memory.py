"""Memory of a device at the peak of a plan, in symbols: the tensors of `memory` and `peak`, at the same moment.

    memory                     bytes per device, while the call runs (forward or backward) at which they are most now
    memory/activations, …      its parts, as `Plan.memory` names them

Another moment may be the fullest at other sizes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import cast

from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import (
    BEHIND,
    FORWARD,
    GATHERING,
    REDUCING,
    UPDATING,
    Moment,
    gradient_is_there,
    is_ahead,
    moment_of,
)
from autopar.costs.memory.peak import memory_use
from autopar.costs.memory.resident_arrays import brings_weight, node_parts, parts_on
from autopar.costs.memory.tensor_bytes import SLICED, Modes, StatedBytes
from autopar.costs.plans.decision_rows import ACTIVATIONS, KEPT_WEIGHTS
from autopar.costs.space.space import Decision, ExpertRows, TensorEdge
from autopar.costs.space.strategy import Strategy
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import Call, largest_split_input
from autopar.views.formulas.autograd_bytes import hidden_bytes
from autopar.views.formulas.local_sizes import LocalSizes, symbolic_call
from autopar.views.formulas.repetition import Repetition
from autopar.views.formulas.symbolic_shapes import input_keys
from autopar.views.formulas.symbols import Polynomial, Size


def memory_formulas(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], sizes: LocalSizes, repetition: Repetition
) -> dict[str, str]:
    """Return the name → formula, at the fullest moment of a choice per decision; none for stages, several micro-batches
    and a forward alone.
    """
    several = memory.microbatches.several or memory.space.program.num_sent
    if memory.live is not None or not memory.lifetimes.calls or several:
        return {}
    at = moment_of(memory, memory_use(memory, choices, modes)[2])
    parts = _Moment(memory, choices, modes, sizes, repetition, at).parts()
    return {"memory": str(Polynomial.sum(parts.values())), **{f"memory/{name}": str(p) for name, p in parts.items()}}


@dataclass(frozen=True, slots=True)
class Rerun:
    """Calls and edges that run again in the backward."""

    calls: frozenset[int] = frozenset()
    communicating: frozenset[int] = frozenset()
    """Calls whose own collectives run again."""
    edges: Mapping[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    """Exposed shares of the collectives that run again on an edge, by its target and input position."""
    regathering: frozenset[int] = frozenset()
    """Calls that the variant runs that gathers again in the backward."""


def rerun(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> Rerun:
    """Return what runs again in the backward under choices and modes."""
    second, numbers = memory.second_forward, range(len(choices))
    return Rerun(
        frozenset(n for n in numbers if second.is_rerun(n, choices, modes)),
        frozenset(n for n in numbers if second.collectives_of(n, choices, modes)),
        {
            (edge.target, edge.target_input): exposed
            for edge in memory.space.edges
            if (exposed := tuple(share for _, share in second.collectives_on(edge, choices, modes)))
        },
        frozenset(
            n
            for n in numbers
            if second.running(n, choices, modes) is not memory.space.decisions[n].candidates.strategies[choices[n]]
        ),
    )


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Bytes that a call or edge offloads to the host, and the exposed seconds per byte."""

    num_bytes: Polynomial
    seconds: float
    """Exposed seconds per byte of the copies to the host and back."""


def offloaded_tensors(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], sizes: LocalSizes, repetition: Repetition
) -> Iterator[Offloaded]:
    """All that leaves for the host."""
    if OFFLOAD not in modes.values():
        return
    tensors = _Moment(memory, choices, modes, sizes, repetition, moment_of(memory, 0))
    space, copies = memory.space, memory.host_copies

    def seconds(number: int) -> float:
        return copies.exposed(memory.lifetimes.segment[number]) / copies.bytes_per_s

    for number in memory.lifetimes.calls:
        num_bytes, count = tensors.offloaded_tensors(number), repetition.of_decision(number)
        if num_bytes:
            yield Offloaded(num_bytes.polynomial * count, seconds(number))
    for edge in space.edges:
        num_bytes, count = tensors.offloaded_on(edge), repetition.of_edge(edge)
        if num_bytes:
            yield Offloaded(num_bytes.polynomial * count, seconds(edge.target))


def mode_of(memory: MemoryModel, number: int, modes: Mapping[str, str], count: int) -> int:
    """Return the index of a decision's mode among `count` arrays per mode; 0 if there is only one."""
    return memory.lifetimes.mode_of(number, modes) if count > 1 else 0


class _Moment:
    """The tensors that a device holds at one moment."""

    def __init__(
        self,
        memory: MemoryModel,
        choices: Sequence[int],
        modes: Mapping[str, str],
        sizes: LocalSizes,
        repetition: Repetition,
        at: Moment,
    ) -> None:
        self.memory, self.space, self.choices, self.modes = memory, memory.space, choices, modes
        self.sizes, self.repetition, self.at = sizes, repetition, at
        self._found: Counter[tuple[str, Polynomial, Polynomial]] = Counter()
        self._elements: dict[tuple[int, Layout], Size] = {}
        self._hidden_bytes: dict[Hashable, Size] = {}

    def parts(self) -> dict[str, Polynomial]:
        """Return the bytes, by what they are."""
        for number, decision in enumerate(self.space.decisions):
            if decision.kind == "call" and not self.at.phase.steps:
                self._call(number)
            elif decision.kind not in ("call", "shared_reshard"):
                self._stored(number)
        if self.at.phase.steps:
            self._add("working set", Size.of(sum(self.memory.stepping.values())), Polynomial.of(1))
        for edge in () if self.at.phase.steps else self.space.edges:
            self._edge(edge)
        parts: dict[str, list[Polynomial]] = defaultdict(list)
        for (name, num_bytes, count), times in self._found.items():
            parts[name].append(num_bytes * count * times)
        return {name: Polynomial.sum(each) for name, each in parts.items()}

    def _add(self, name: str, num_bytes: Size | Polynomial, count: Polynomial, rows: ExpertRows | None = None) -> None:
        """Count bytes; of expert rows also those above an equal share."""
        self._found[name, Polynomial.of(num_bytes), count] += 1
        if rows is not None and isinstance(num_bytes, Size):
            self._found[name, self._uneven_bytes(num_bytes, rows).polynomial, count] += 1

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
        first_use = self.memory.lifetimes.position[number]
        if gradients is not None and gradient_is_there(self.memory, self.at, first_use):
            held["gradients"] = gradients
        if self.at.kind == UPDATING and first_use == self.at.place and number in self.memory.stepping:
            self._add("working set", Size.of(self.memory.stepping[number]), Polynomial.of(1))
        for name, array in held.items():
            layout = decision.candidates.strategies[choice].outputs[0]
            elements = self._local(self.sizes.shape((decision.node.name, 0)), layout)
            if elements:
                self._add(name, elements.polynomial * Fraction(int(array[choice]), int(elements)), count)

    def _call(self, number: int) -> None:
        """Count the bytes that a call saves, and its working set if it is the call that runs."""
        decision, choice, count = (
            self.space.decisions[number],
            self.choices[number],
            self.repetition.of_decision(number),
        )
        place, held = self.memory.lifetimes.position[number], node_parts(self.memory, number)
        kept = self._of_mode(number, held.own, held.rerun, (choice,)) if self._is_kept(place) else 0
        if kept:
            self._add(ACTIVATIONS, self._kept(number, kept), count, self.space.rows.get(number))
        working, handed_on = self.memory.working(number), self.memory.handed_on(number)
        if working is not None and self.at.computes(place):
            self._worked_on(number, True)
            if self._stated(number, "forward_bytes") is None:
                self._add("working set", self._worked_on_meanwhile(number), count)
            op = decision.candidates.op
            if op is not None and op.backward_bytes is not None:
                self._add("working set", self._stated_bytes(decision, op.backward_bytes) or Size.of(0), count)
            self._uneven_rows_worked_on(number, True)
        elif handed_on is not None and self.at.kind in BEHIND and place == self.at.place:
            self._worked_on(number, False)
            self._uneven_rows_worked_on(number, False)
        elif self.at.kind == FORWARD and place == self.at.place:
            self._add("working set", self._stated(number, "forward_bytes") or Size.of(0), count)

    def _is_kept(self, place: int) -> bool:
        """Return whether tensors saved for the backward of the call at this position are resident."""
        return place <= self.at.place and not self.at.has_run(place)

    def _worked_on(self, number: int, computes: bool) -> None:
        """Gradients of a call's inputs and outputs, and its outputs; or only gradients that go on to other calls."""
        decision, count = self.space.decisions[number], self.repetition.of_decision(number)
        strategy, call = decision.candidates.strategies[self.choices[number]], decision.candidates.call
        assert call is not None
        read = zip(input_keys(self.space, decision), call.inputs, strategy.inputs, strict=True)
        for position, (key, info, layout) in enumerate(read):
            weight = self.space.is_weight(self.space.inbound[number, position].source)
            if info.requires_grad and (computes or not weight):
                self._add("working set", self._local(self.sizes.shape(key), layout) * info.dtype.itemsize, count)
        for position, info in enumerate(call.outputs if computes else ()):
            elements = self._local(self.sizes.shape((decision.name, position)), strategy.outputs[position])
            self._add("working set", elements * info.dtype.itemsize, count)

    def _uneven_rows_worked_on(self, number: int, computes: bool) -> None:
        """Count the working-set bytes of expert rows beyond an equal share."""
        rows, decision = self.space.rows.get(number), self.space.decisions[number]
        share = self.sizes.share(rows, self.choices)
        if rows is None or not share:
            return
        strategy, call = decision.candidates.strategies[self.choices[number]], decision.candidates.call
        assert call is not None
        keys = [*input_keys(self.space, decision), *((decision.name, place) for place in range(len(call.outputs)))]
        infos, layouts = (*call.inputs, *call.outputs), (*strategy.inputs, *strategy.outputs)
        wanted = [place for place in rows.inputs if call.inputs[place].requires_grad]
        wanted += [len(call.inputs) + place for place in rows.outputs] if computes else []
        parts = (self._local(self.sizes.shape(keys[i]), layouts[i]) * infos[i].dtype.itemsize for i in wanted)
        hidden = self._hidden(number, self.memory.lifetimes.saved(decision).other_bytes) if computes else Size.of(0)
        uneven_bytes = self._uneven_bytes(Size.of(sum(parts, hidden)), rows)
        self._add("working set", uneven_bytes, self.repetition.of_decision(number))

    def _uneven_bytes(self, num_bytes: Size, rows: ExpertRows) -> Size:
        """Return the bytes of expert rows above an equal share, given the bytes of a share."""
        value = math.ceil(self.space.uneven_share(rows, self.choices) * num_bytes)
        share = self.sizes.share(rows, self.choices)
        return Size.symbol(f"ceiling(({num_bytes.polynomial})*({share} - 1))", value) if share else Size.of(0)

    def _of_mode(self, number: int, kept: Modes | None, rerun: Modes | None, choices: tuple[int, ...]) -> int:
        """Return the bytes at the moment of what a decision saves, in the mode of its segment."""
        there = self.at.of_modes(self.memory, number, kept, rerun)
        return 0 if there is None else int(there[mode_of(self.memory, number, self.modes, len(there))][choices])

    def _kept(self, number: int, kept: int) -> Size:
        """Return the outputs and hidden tensors that make this many bytes."""
        decision, strategy = self.space.decisions[number], self.space.decisions[number].candidates.strategies
        call, layouts = decision.candidates.call, strategy[self.choices[number]].outputs
        assert call is not None
        saved = self.memory.lifetimes.saved(decision)
        outputs = [
            self._local(self.sizes.shape((decision.name, i)), layout) * info.dtype.itemsize
            for i, (info, layout) in enumerate(zip(call.outputs, layouts, strict=True))
        ]
        hidden = self._hidden(number, saved.other_bytes)
        alone = {i for i in range(len(outputs)) if not self.memory.lifetimes.needs_output(number, i)}
        for positions in (saved.outputs, range(len(outputs)), saved.outputs | alone):
            found = Size.of(sum((outputs[i] for i in positions), hidden))
            if found == kept:
                return found
        raise AssertionError(f"{decision.name} keeps {kept} bytes, which are not its outputs and hidden tensors")

    def offloaded_tensors(self, number: int) -> Size | None:
        """Return the bytes that a call itself offloads to the host; None if there are none."""
        left = self.memory.host_copies.bytes_of(number) if self._leaves(number) else None
        kept = 0 if left is None else int(left[self.choices[number]])
        return self._kept(number, kept) if kept else None

    def offloaded_on(self, edge: TensorEdge) -> Size | None:
        """Return the bytes that are offloaded to the host for an edge; None if there are none."""
        left = self.memory.host_copies.bytes_on(edge) if self._leaves(edge.target) else None
        ends = self.choices[edge.source], self.choices[edge.target]
        return self._kept_on(edge, int(left[ends])) if left is not None and left[ends] else None

    def _leaves(self, number: int) -> bool:
        return self.modes.get(self.memory.lifetimes.segment[number]) == OFFLOAD

    def _kept_on(self, edge: TensorEdge, kept: int) -> Size:
        """Return the size of a tensor of which an edge saves so many bytes, as it arrives or as it was before."""
        source, target = (
            self.space.decisions[n].candidates.strategies[self.choices[n]] for n in (edge.source, edge.target)
        )
        unmoved = self.memory.kinds(edge)[self.choices[edge.source], self.choices[edge.target]] <= SLICED
        before, after = (
            self._local(self.sizes.of_edge(edge), layout) * edge.tensor.dtype.itemsize
            for layout in (source.outputs[edge.source_output], target.inputs[edge.target_input])
        )
        return before if unmoved or before == kept != after else after

    def _hidden(self, number: int, num_bytes: int) -> Size:
        """Return the bytes per device that autograd saves besides inputs and outputs, split as the largest input."""
        decision = self.space.decisions[number]
        call, strategy = decision.candidates.call, decision.candidates.strategies[self.choices[number]]
        if call is None or not call.inputs:
            return Size.of(0)
        stated = self._stated(number, "saved_bytes")
        if stated is not None:
            return stated
        if not num_bytes:
            return Size.of(0)
        largest = largest_split_input(call, decision.candidates.bound)
        shapes = tuple(self.sizes.shape(key) for key in input_keys(self.space, decision))
        key = (id(decision.candidates), num_bytes, *map(id, shapes))
        if key not in self._hidden_bytes:
            self._hidden_bytes[key] = hidden_bytes(decision, call, shapes, num_bytes, self.sizes.symbols)
        elements = Size.of(math.prod(shapes[largest]))
        return -(-self._hidden_bytes[key] * self._local(shapes[largest], strategy.inputs[largest]) // elements)

    def _worked_on_meanwhile(self, number: int) -> Size:
        """Return the working bytes of a call's backward in addition to its outputs and gradients."""
        stated = self._stated(number, "backward_bytes")
        if stated is not None:
            return stated
        return self._hidden(number, self.memory.lifetimes.saved(self.space.decisions[number]).other_bytes)

    def _stated(self, number: int, cost: StatedBytes) -> Size | None:
        """Return the bytes that the implementation that runs a call states; None if it states none."""
        running = self.memory.second_forward.running(number, self.choices, self.modes)
        if not running.implemented:
            return None
        return self._stated_bytes(self.space.decisions[number], getattr(running.implementation, cost))

    def _stated_bytes(
        self, decision: Decision, specified: Callable[[Call, Mapping[str, int]], int | None]
    ) -> Size | None:
        """Return the bytes that a function says of a call, if it says any."""
        call, bound, strategy = decision.candidates.call, decision.candidates.bound, self._strategy(decision)
        assert call is not None and bound is not None
        shapes = [self.sizes.shape(key) for key in input_keys(self.space, decision)]
        results = [self.sizes.shape((decision.name, position)) for position in range(len(call.outputs))]
        local = strategy.local_sizes(bound.rule.bind(shapes, results).sizes, cast(Mesh, self.sizes.axes))
        found = specified(symbolic_call(call, shapes, results), local)
        return None if found is None else Size.of(found)

    def _strategy(self, decision: Decision) -> Strategy:
        return decision.candidates.strategies[self.choices[self.space.index[decision.name]]]

    def _edge(self, edge: TensorEdge) -> None:
        """A tensor that is saved for its consumer, a weight that is gathered, and a gradient that is to be reduced."""
        memory, count = self.memory, self.repetition.of_edge(edge)
        ends, place = (self.choices[edge.source], self.choices[edge.target]), memory.lifetimes.position[edge.target]
        if place >= len(memory.lifetimes.calls):
            return
        source, target = (
            self.space.decisions[n].candidates.strategies[self.choices[n]] for n in (edge.source, edge.target)
        )
        found, unreduced = parts_on(memory, edge), memory.weights.unreduced(edge)
        last_made, sent_off = memory.weights.last_made(edge), memory.weights.sent_off(edge)
        gathered = memory.weights.gathered(edge) if self.at.kind == FORWARD else memory.weights.gathered_again(edge)
        shape, itemsize = self.sizes.of_edge(edge), edge.tensor.dtype.itemsize
        there = self._of_mode(edge.target, found.saved, found.rerun, ends) if self._is_kept(place) else 0
        if there:
            name = KEPT_WEIGHTS if brings_weight(self.space, edge) else ACTIVATIONS
            self._add(name, self._kept_on(edge, there), count, self.space.rows_on(edge))
        whole = self._local(shape, target.inputs[edge.target_input]) * itemsize
        on_way = memory.weights.on_way(edge, self.at.kind == FORWARD)
        if on_way is not None and on_way[ends] and is_ahead(memory, memory.lifetimes.layer[edge.target], self.at):
            part = self._local(shape, source.outputs[edge.source_output]) * itemsize
            for each in (whole, part):
                self._add("gathered weights", each, count)
        if memory.lifetimes.layer[edge.target] != memory.lifetimes.layer[memory.lifetimes.calls[self.at.place]]:
            return
        if gathered is not None and gathered[ends]:
            copied = memory.weights.copied_out(edge) if self.at.kind == GATHERING else None
            twice = copied is not None and bool(copied[ends])
            for _ in range(0 if self.at.kind in BEHIND else 2 if twice else 1):
                self._add("gathered weights", whole, count)
        if unreduced is not None and unreduced[ends] and place > self.at.place and self.at.kind != FORWARD:
            self._add("gradients", whole, count)
        itemsize = (edge.tensor.reduced or edge.tensor.dtype).itemsize
        sent = self._local(shape, target.inputs[edge.target_input]) * itemsize
        if sent_off is not None and sent_off[ends] and place >= self.at.place and self.at.kind == REDUCING:
            self._add("gradients", sent, count)
        if last_made is not None and last_made[ends] and place == self.at.place and self.at.kind == REDUCING:
            self._add("gradients", sent, count)
