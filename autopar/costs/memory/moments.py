"""Moments of a step, and the bytes that every choice holds at one: rows of the problem that is solved."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

from autopar.costs.memory.live import Interval
from autopar.costs.memory.microbatches import Microbatches, Phase
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.resident_arrays import ManyParts, WeightParts, node_parts, parts_on
from autopar.costs.memory.tensor_bytes import Bytes, Modes, uneven_modes
from autopar.costs.space.space import TensorEdge
from autopar.ir.program.recompute_segments import MODES


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The bytes at moments of a step (see `moment_of`), added up with whole weights.

    With `worst` it is instead the largest of them, taken for each choice by itself: a choice that fits this row fits at
    each of the moments, though not every choice that does so fits the row.
    """

    weights: tuple[tuple[int, int], ...]
    worst: bool = False

    @property
    def total(self) -> int:
        """Number of times that the memory limit counts in the limit of the row."""
        return 1 if self.worst else sum(weight for _, weight in self.weights)


@dataclass(frozen=True, slots=True)
class PricedMemory:
    """Moments of a step, and what a byte at them is worth in seconds."""

    row: MemoryRow
    price: float

    def of_the_same_calls(self, own: MemoryModel, other: MemoryModel) -> PricedMemory | None:
        """Return the same in a model of memory whose calls have the same names; of others, where the backward begins.

        None where the two run their micro-batches otherwise.
        """
        if own.microbatches != other.microbatches or not other.lifetimes.calls:
            return None
        places = {other.space.decisions[number].name: place for place, number in enumerate(other.lifetimes.calls)}
        weights: dict[int, int] = defaultdict(int)
        for moment, weight in self.row.weights:
            kind, place = divmod(moment, len(own.lifetimes.calls))
            same = places.get(own.space.decisions[own.lifetimes.calls[place]].name)
            weights[len(places) - 1 if same is None else kind * len(places) + same] += weight
        return PricedMemory(MemoryRow(tuple(sorted(weights.items()))), self.price)


def node_bytes(memory: MemoryModel, number: int, row: MemoryRow) -> Modes:
    """Return the bytes of a decision in a row, by strategy; one array per mode of its segment where the mode
    matters.
    """
    if memory.live is not None:
        return _alive(memory, row, memory.live.made(number), number)
    held, first_use = node_parts(memory, number), memory.lifetimes.position[number]
    gradients, own = held.gradients, held.own
    moments: list[tuple[int, list[Modes]]] = []
    for moment, weight in row.weights:
        at = moment_of(memory, moment)
        parts: list[Modes] = [(array,) for _, array in held.stored]
        if (received := memory.accumulation.received(number, at.phase)) is not None:
            parts.append((received,))
        if at.phase.end:
            there = memory.stepped(number) if at.phase.steps else [gradients]
            parts += [(array,) for array in there if array is not None]
            moments.append((weight, [*parts, *_while_saved(memory, at, number, own, held.rerun)]))
            continue
        if gradients is not None and gradient_is_there(memory, at, first_use):
            parts.append((gradients,))
        parts += _while_saved(memory, at, number, own, held.rerun)
        if at.place == first_use and at.kind != GATHERING:
            works_on = (
                memory.working(number) if at.kind == COMPUTING else _in_every_mode(WORKS_ON[at.kind](memory, number))
            )
            steps_on = _in_every_mode(memory.works_on(number) if at.kind == UPDATING else None)
            parts += [modes for modes in (works_on, steps_on) if modes is not None]
        moments.append((weight, parts))
    num_strategies = len(memory.space.decisions[number].candidates.strategies)
    return memory.total(moments, row.worst) or (memory.nothing((num_strategies,)),)


def _in_every_mode(array: Bytes | None) -> Modes | None:
    return None if array is None else (array,)


def edge_bytes(memory: MemoryModel, edge: TensorEdge, row: MemoryRow) -> Modes | None:
    """Return the bytes of an edge in a row, by the strategies at its ends; one array per mode if the mode matters."""
    if memory.live is not None:
        return _alive_on_edge(memory, edge, row, memory.live.moved(edge))
    found, place = parts_on(memory, edge), memory.lifetimes.position[edge.target]
    saved, sent, of_weight, many = found.saved, found.sent, found.weight, found.many
    if saved is None and sent is None and of_weight is None and many is None:
        return None
    more = memory.accumulation
    moments: list[tuple[int, list[Modes]]] = []
    for moment, weight in row.weights:
        at = moment_of(memory, moment)
        parts: list[Modes] = [] if many is None else _of_many(memory, many, at, place)
        parts += _while_saved(memory, at, edge.target, saved, found.rerun)
        if sent is not None and (at.phase.others or not at.phase.end):
            parts.append(more.waiting(sent, at.phase.others + (not at.phase.end)))
        if of_weight is not None and not at.phase.end:
            parts += _on_its_way(memory, of_weight, at, edge.target)
        moments.append((weight, parts))
    return memory.total(moments, row.worst)


def _of_many(memory: MemoryModel, many: ManyParts, at: Moment, place: int) -> list[Modes]:
    """Return the bytes of an edge to the call at `place` that are due to micro-batch accumulation, at a moment."""
    has_run, first = at.has_run(place), at.phase.first
    there: list[Bytes | None] = [many.held if not at.phase.steps or memory.microbatches.stashes else None]
    if at.phase.end:
        there += [] if at.phase.steps else [many.accumulated, many.reduced]
    else:
        there += [
            many.accumulated if has_run or not first else None,
            many.arrived if has_run and not first else None,
            many.fresh if at.computes(place) else None,
        ]
    return [(each,) for each in there if each is not None]


def _on_its_way(memory: MemoryModel, weight: WeightParts, at: Moment, target: int) -> list[Modes]:
    """Return the bytes of a weight or its gradient in transit between storage and use, at a moment."""
    place, layer, kind = memory.lifetimes.position[target], memory.lifetimes.layer[target], at.kind
    there: list[Bytes | None] = []
    if is_ahead(memory, layer, at):
        there.append(weight.on_way if kind == FORWARD else weight.on_way_again)
    if layer == memory.lifetimes.layer[memory.lifetimes.calls[at.place]]:
        there += [
            weight.gathered if kind == FORWARD else None,
            weight.again if kind in (COMPUTING, GATHERING) else None,
            weight.copied if kind == GATHERING else None,
            weight.unreduced if place > at.place and kind != FORWARD else None,
            weight.sent_off if kind == REDUCING and place >= at.place else None,
            weight.last_made if kind == REDUCING and place == at.place else None,
        ]
    return [(each,) for each in there if each is not None]


def gradient_is_there(memory: MemoryModel, at: Moment, first_use: int) -> bool:
    """Return whether the reduced gradient of a parameter is resident; `first_use` is the position of its first call.

    An optimizer that updates in the backward, or offloads gradients, frees them once those of the layer are reduced.
    """
    if not memory.frees_gradients:
        return at.has_run(first_use) or not at.phase.first
    calls, layer = memory.lifetimes.calls, memory.lifetimes.layer
    return first_use < len(calls) and at.has_run(first_use) and layer[calls[first_use]] == layer[calls[at.place]]


def _alive(memory: MemoryModel, row: MemoryRow, made: list[Interval], number: int) -> Modes:
    """Return the bytes of a decision in a row, in a forward alone."""
    stored = memory.stored(number).values()
    moments: list[tuple[int, list[Modes]]] = []
    for moment, weight in row.weights:
        at = moment_of(memory, moment)
        alive = (each.num_bytes for each in made if each.covers(at.place))
        received = memory.accumulation.received(number, at.phase)
        there = (*stored, *alive) if received is None else (*stored, *alive, received)
        moments.append((weight, [(array,) for array in there]))
    num_strategies = len(memory.space.decisions[number].candidates.strategies)
    return memory.total(moments, row.worst) or (memory.nothing((num_strategies,)),)


def _alive_on_edge(memory: MemoryModel, edge: TensorEdge, row: MemoryRow, moved: list[Interval]) -> Modes | None:
    """Return the bytes of an edge in a row, in a forward alone."""
    weights, layer = memory.weights, memory.lifetimes.layer[edge.target]
    gathered, on_way, arriving = weights.gathered(edge), weights.on_way(edge, True), weights.arriving(edge)
    moments: list[tuple[int, list[Modes]]] = []
    for moment, weight in row.weights:
        at = moment_of(memory, moment)
        parts: list[Modes] = [(each.num_bytes,) for each in moved if each.covers(at.place)]
        if gathered is not None and layer == memory.lifetimes.layer[memory.lifetimes.calls[at.place]]:
            parts.append((gathered,))
            if arriving is not None and at.kind == GATHERING:
                parts.append((arriving,))
        if on_way is not None and is_ahead(memory, layer, at):
            parts.append((on_way,))
        moments.append((weight, parts))
    return memory.total(moments, row.worst)


def uneven_node_bytes(memory: MemoryModel, number: int, row: MemoryRow) -> Modes | None:
    """Return the bytes of a call in a row for expert rows above an equal share (see `tensor_bytes.uneven_modes`)."""
    if memory.live is not None:
        return None
    rows, held = memory.space.rows[number], node_parts(memory, number)
    more, rerun = (None if each is None else uneven_modes(memory, rows, each) for each in (held.own, held.rerun))
    moments: list[tuple[int, list[Modes]]] = []
    for moment, weight in row.weights:
        at = moment_of(memory, moment)
        parts = _while_saved(memory, at, number, more, rerun)
        if at.place == memory.lifetimes.position[number] and not at.phase.end:
            if at.kind == COMPUTING and memory.working(number) is not None:
                parts.append(uneven_modes(memory, rows, (memory.working_rows(number),)))
            elif at.kind in BEHIND:
                parts.append(uneven_modes(memory, rows, (memory.handed_on_rows(number),)))
        moments.append((weight, parts))
    return memory.total(moments, row.worst)


def uneven_edge_bytes(memory: MemoryModel, edge: TensorEdge, row: MemoryRow) -> Modes | None:
    """Return the bytes of an edge in a row for expert rows above an equal share."""
    rows, found = memory.space.rows_on(edge), parts_on(memory, edge)
    if rows is None or found.saved is None:
        return None
    more, rerun = (None if each is None else uneven_modes(memory, rows, each) for each in (found.saved, found.rerun))
    moments = [(moment_of(memory, moment), weight) for moment, weight in row.weights]
    return memory.total(
        [(weight, _while_saved(memory, at, edge.target, more, rerun)) for at, weight in moments],
        row.worst,
    )


def _while_saved(memory: MemoryModel, at: Moment, number: int, saved: Modes | None, rerun: Modes | None) -> list[Modes]:
    """Return the bytes saved for the backward of a decision's first use, for all micro-batches yet to run it."""
    parts: list[Modes] = []
    if not at.phase.end and at.keeps(memory.lifetimes.position[number]):
        there = at.of_modes(memory, number, saved, rerun)
        parts += [] if there is None else [there]
    if at.phase.others and saved is not None:
        parts.append(memory.accumulation.waiting(saved, at.phase.others))
    return parts


COMPUTING, GATHERING, REDUCING, UPDATING, FORWARD = range(5)  # what happens on account of a call; but the last backward
BEHIND = (REDUCING, UPDATING)  # when the call itself has run
WORKS_ON = {
    REDUCING: MemoryModel.handed_on,
    UPDATING: MemoryModel.handed_on,
    FORWARD: MemoryModel.working_forward,
}


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: on account of the call at which place, in which of its backwards, and what happens."""

    place: int
    phase: Phase
    kind: int

    def has_run(self, place: int) -> bool:
        """Return whether the backward of the call at that position has finished."""
        return self.kind != FORWARD and place + (self.kind in BEHIND) > self.place

    def keeps(self, place: int) -> bool:
        """Return whether the tensors saved for the backward of the call at that position are resident."""
        return place <= self.place if self.kind == FORWARD else not self.has_run(place)

    def computes(self, place: int) -> bool:
        """Return whether the call at that position is running its backward at this moment."""
        return place == self.place and self.kind == COMPUTING

    def frees(self, memory: MemoryModel, number: int) -> bool:
        """Return whether recomputation frees memory of a decision at this moment.

        It does not while the decision's own segment is being recomputed.
        """
        waits = self.kind in (FORWARD, GATHERING)
        return waits or memory.lifetimes.segment[number] != memory.lifetimes.segment[memory.lifetimes.calls[self.place]]

    def is_near(self, memory: MemoryModel, number: int) -> bool:
        """Return whether a decision's segment, if offloaded, still or already has its saved tensors on the device."""
        return memory.lifetimes.segment[number] in memory.lifetimes.near[self.place]

    def of_modes(self, memory: MemoryModel, number: int, saved: Modes | None, rerun: Modes | None) -> Modes | None:
        """Return a decision's saved bytes that are resident, by mode; `rerun` while its own segment runs again."""
        if not self.frees(memory, number):
            return rerun
        if saved is None:
            return None
        is_back = len(saved) == len(MODES) and self.is_near(memory, number)
        return (*saved[:-1], saved[0]) if is_back else saved


def is_ahead(memory: MemoryModel, layer: str, at: Moment) -> bool:
    """Return whether weights of a layer are in transit at a moment, fetched ahead of their use."""
    return memory.weights.is_ahead(layer, at.place, is_forward(memory, at.kind), depth_at(memory, at.kind))


def is_forward(memory: MemoryModel, kind: int) -> bool:
    """Return whether moments of a kind belong to the forward; in a forward-only program all do."""
    return kind == FORWARD or memory.live is not None


def depth_at(memory: MemoryModel, kind: int) -> int:
    """Return how many layers ahead weights are in transit.

    It is one less while a layer's weights arrive, before the next fetch starts.
    """
    return max(0, memory.prefetch - (kind == GATHERING))


def moment_of(memory: MemoryModel, moment: int) -> Moment:
    """Return the moment of that number: places, over phases, over kinds."""
    return _moment_at(moment, len(memory.lifetimes.calls), memory.microbatches)


@functools.lru_cache(maxsize=1024)
def _moment_at(moment: int, num_calls: int, microbatches: Microbatches) -> Moment:
    number, place = divmod(moment, num_calls)
    kind, number = divmod(number, len(microbatches.phases))
    return Moment(place, microbatches.phases[number], kind)
