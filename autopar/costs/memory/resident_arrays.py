"""Byte arrays of decisions and edges, looked up once; moments and peaks add them up.

`moments` says whether a part is resident at a moment; `sums_of` adds up all parts of a plan, position by position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costs.memory.accumulation import RECEIVED, RETURNED
from autopar.costs.memory.live import Interval, Live
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.tensor_bytes import Bytes, Modes
from autopar.costs.space.space import ExpertRows, Space, TensorEdge


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Byte arrays of a decision; None for a part it does not have."""

    stored: tuple[tuple[str, Bytes], ...]
    gradients: Bytes | None
    own: Modes | None
    rerun: Modes | None
    """Bytes of `own` that are there while the segment runs again."""


@dataclass(frozen=True, slots=True)
class WeightParts:
    """Byte arrays of a weight in transit over an edge; None for a part it does not have."""

    gathered: Bytes | None
    again: Bytes | None
    copied: Bytes | None
    unreduced: Bytes | None
    sent_off: Bytes | None
    last_made: Bytes | None
    on_way: Bytes | None
    on_way_again: Bytes | None


@dataclass(frozen=True, slots=True)
class ManyParts:
    """Byte arrays of an edge that are due to micro-batch accumulation; None for a part it does not have."""

    held: Bytes | None
    accumulated: Bytes | None
    fresh: Bytes | None
    reduced: Bytes | None
    arrived: Bytes | None


@dataclass(frozen=True, slots=True)
class EdgeParts:
    """Byte arrays of an edge; None for a part it does not have."""

    saved: Modes | None
    rerun: Modes | None
    """Bytes of `saved` that are resident while the segment runs again."""
    sent: Modes | None
    weight: WeightParts | None
    many: ManyParts | None


def node_parts(memory: MemoryModel, number: int) -> NodeParts:
    """Return the byte arrays of a decision, looked up once."""
    found = memory.parts.get(number)
    if found is None:
        stored = tuple(memory.stored(number).items())
        own = memory.own(number), memory.own(number, with_rerun=True)
        found = NodeParts(stored, memory.accumulation.gradients(number), *own)
        memory.parts[number] = found
    return found


def parts_on(memory: MemoryModel, edge: TensorEdge) -> EdgeParts:
    """Return the byte arrays of an edge, looked up once."""
    end = edge.target, edge.target_input
    found = memory.parts.get(end)
    if found is None:
        weight = _of_weight(memory, edge) if memory.space.is_weight(edge.source) else None
        many = _of_many(memory, edge) if memory.accumulation.holds(edge) else None
        saved = memory.edge(edge)
        rerun = None if saved is None else memory.with_rerun(saved)
        found = EdgeParts(saved, rerun, memory.accumulation.sent(edge), weight, many)
        memory.parts[end] = found
    return found


def _of_weight(memory: MemoryModel, edge: TensorEdge) -> WeightParts:
    weights = memory.weights
    return WeightParts(
        weights.gathered(edge),
        weights.gathered_again(edge),
        weights.copied_out(edge),
        weights.unreduced(edge),
        weights.sent_off(edge),
        weights.last_made(edge),
        weights.on_way(edge, True),
        weights.on_way(edge, False),
    )


def _of_many(memory: MemoryModel, edge: TensorEdge) -> ManyParts:
    more = memory.accumulation
    return ManyParts(more.held(edge), more.accumulated(edge), more.fresh(edge), more.reduced(edge), more.arrived(edge))


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a decision or an edge, and the sum that they add to at a position."""

    name: str
    place: int
    modes: Modes
    """Bytes by the strategies at the ends; one array, or one per mode."""
    ends: tuple[int, ...]
    of: int = 0
    """The decision whose segment says the mode, where that matters."""
    rows: ExpertRows | None = None
    """Expert rows of which this part adds the bytes beyond an equal share; None to add the bytes themselves.

    If set, the bytes are those of an equal share of these rows.
    """
    sign: int = 1


class _Read:
    """Parts of the same arrays: numbers of the decisions at their ends, and where in all sums they add."""

    def __init__(self, parts: Sequence[Part], places: Sequence[int]) -> None:
        self.modes, self.rows = parts[0].modes, parts[0].rows
        self.ends = tuple(np.array([part.ends for part in parts], dtype=np.intp).T)
        self.of = np.array([part.of for part in parts], dtype=np.intp)
        self.places, self.signs = np.array(places, dtype=np.intp), np.array([part.sign for part in parts])

    def at(self, chosen: np.ndarray, modes: np.ndarray) -> np.ndarray:
        """Return the bytes of each part at the choice and the mode of every decision."""
        index = tuple([chosen[end] for end in self.ends])
        if len(self.modes) == 1:
            return self.modes[0][index]
        of_each = np.minimum(modes[self.of], len(self.modes) - 1)
        return np.choose(of_each, [each[index] for each in self.modes])


class Sums:
    """Byte totals of a plan's choices by name and position; parts with equal arrays are read together."""

    def __init__(self, parts: Iterable[Part], width: int) -> None:
        """Each sum has so many places; those of `NAMES` are there though nothing adds to them."""
        self._width = width
        self._numbers = {name: number for number, name in enumerate(NAMES)}
        alike: dict[object, list[Part]] = defaultdict(list)
        for part in parts:
            self._numbers.setdefault(part.name, len(self._numbers))
            alike[part.rows, len(part.ends), *map(id, part.modes)].append(part)
        self._reads = [
            _Read(each, [self._numbers[part.name] * width + part.place for part in each]) for each in alike.values()
        ]

    def at(
        self, choices: Sequence[int], modes: np.ndarray, uneven_share: Callable[[ExpertRows], float]
    ) -> dict[str, np.ndarray]:
        """Return the bytes by place, by name, at a choice per decision and the number of a mode for each."""
        chosen, found = np.array(choices, dtype=np.intp), np.zeros(len(self._numbers) * self._width, dtype=np.int64)
        for each in self._reads:
            num_bytes = each.at(chosen, modes)
            if each.rows is not None:
                num_bytes = np.ceil(uneven_share(each.rows) * num_bytes).astype(np.int64)
            np.add.at(found, each.places, each.signs * num_bytes)
        return dict(zip(self._numbers, found.reshape(-1, self._width), strict=True))


BY_PLACE = (
    *("saved", "whole", "weights saved", "weights whole", "born", "arrived", "fresh"),
    *("working", "working forward", "handed on", "unreduced", "sent off", "last made", "alive"),
)
"""Sums over the places of calls: saved for the backward by place of use, as the modes say and while its segment runs
again, and the gathered weights among them; gradients as they are stored, and as they are made; what calls work on and
hand on; what is more from a place on."""
BY_LAYER = ("gathered", "gathered again", "copied", "on way", "on way again")
"""Sums over layers, by number: gathered weights, of these such as are gathered again for the backward, of these, or in
a forward alone of all, such as are copied out of a message; weights that may be fetched ahead, forward and backward."""
AT_ONCE = ("stepped", "reduced", "sent", RECEIVED, RETURNED)
"""Gradients as they are stored with what the optimizer works on, those that are reduced at the end, and what one
micro-batch has sent, has received, and receives for its backward."""
NAMES = (*BY_PLACE, *BY_LAYER, *AT_ONCE)
"""Sums of what is not there all the time."""


def sums_of(memory: MemoryModel, with_uneven_rows: bool) -> Sums:
    """Return all that choices hold of a model; of expert rows an equal share, or with those above it.

    Permanently resident bytes have the names under which they are stored.
    """
    key = "sums", with_uneven_rows
    if key not in memory.parts:
        live = memory.live
        parts = _of_step(memory, with_uneven_rows) if live is None else _of_forward(memory, live, with_uneven_rows)
        width = max(len(memory.lifetimes.calls) + 1, len(memory.lifetimes.layers))
        memory.parts[key] = Sums(parts, width)
    return memory.parts[key]


def _of_step(memory: MemoryModel, with_uneven_rows: bool) -> Iterator[Part]:
    space, count = memory.space, len(memory.lifetimes.calls)
    in_backward = () if memory.microbatches.works else memory.stepping
    ends_something = {memory.lifetimes.position[number] for number in in_backward}
    ends_something.update(memory.weights.first_reduction.values())
    for number, place in enumerate(memory.lifetimes.position):
        held, ends, rows = node_parts(memory, number), (number,), space.rows.get(number) if with_uneven_rows else None
        for name, array in held.stored:
            yield Part(name, 0, (array,), ends)
        yield from _received(memory, number)
        for array in memory.stepped(number) if memory.microbatches.works else ():
            yield Part("stepped", 0, (array,), ends)
        if held.gradients is not None:
            yield Part("born", min(place, count), (held.gradients,), ends)
        if place < count:
            yield from _saved_bytes(place, held.own, held.rerun, ends, number, rows)
        if (working := memory.working(number)) is not None:
            yield Part("working", place, working, ends, number)
            if rows is not None:
                yield Part("working", place, (memory.working_rows(number),), ends, rows=rows)
        if (forward := memory.working_forward(number)) is not None:
            yield Part("working forward", place, (forward,), ends)
        if place in ends_something and (handed_on := memory.handed_on(number)) is not None:
            yield Part("handed on", place, (handed_on,), ends)
            if rows is not None:
                yield Part("handed on", place, (memory.handed_on_rows(number),), ends, rows=rows)
    for edge in space.edges:
        ends, place, found = (edge.source, edge.target), memory.lifetimes.position[edge.target], parts_on(memory, edge)
        if found.sent is not None:
            yield Part("sent", 0, found.sent, ends, of=edge.source)
        if found.many is not None:
            yield from _for_many(found.many, place, ends, count)
        if found.saved is not None and place < count:
            rows = space.rows_on(edge) if with_uneven_rows else None
            yield from _saved_bytes(place, found.saved, found.rerun, ends, edge.target, rows)
            if brings_weight(space, edge):
                yield from _saved_bytes(place, found.saved, found.rerun, ends, edge.target, rows, "weights ")
        if found.weight is not None and place < count:
            yield from _moved(memory, edge, found.weight, found.weight.copied)


def _of_forward(memory: MemoryModel, live: Live, with_uneven_rows: bool) -> Iterator[Part]:
    space = memory.space
    for number in range(len(space.decisions)):
        for name, array in memory.stored(number).items():
            yield Part(name, 0, (array,), (number,))
        yield from _received(memory, number)
        yield from _alive(live.made(number), (number,), space.rows.get(number) if with_uneven_rows else None)
    for edge in space.edges:
        yield from _alive(
            live.moved(edge), (edge.source, edge.target), space.rows_on(edge) if with_uneven_rows else None
        )
        of_weight = parts_on(memory, edge).weight
        if of_weight is not None and memory.lifetimes.position[edge.target] < len(memory.lifetimes.calls):
            yield from _moved(memory, edge, of_weight, memory.weights.arriving(edge))


def _received(memory: MemoryModel, number: int) -> Iterator[Part]:
    """Yield the receive buffer of a decision for one micro-batch, if it has one."""
    if (found := memory.accumulation.buffers(number)) is not None:
        name, array = found
        yield Part(name, 0, (array,), (number,))


def brings_weight(space: Space, edge: TensorEdge) -> bool:
    """Return whether a parameter arrives over an edge, also by way of shared reshards."""
    while space.decisions[edge.source].kind == "shared_reshard":
        edge = space.inbound[edge.source, 0]
    return space.is_weight(edge.source)


def _saved_bytes(
    place: int,
    saved: Modes | None,
    rerun: Modes | None,
    ends: tuple[int, ...],
    of: int,
    rows: ExpertRows | None,
    what: str = "",
) -> Iterator[Part]:
    for each in (None,) if rows is None else (None, rows):
        for name, modes in (("saved", saved), ("whole", rerun)):
            if modes is not None:
                yield Part(f"{what}{name}", place, modes, ends, of, each)


def _for_many(many: ManyParts, place: int, ends: tuple[int, ...], count: int) -> Iterator[Part]:
    """Yield the parts of an edge, to the call at `place`, that are due to micro-batch accumulation."""
    found = (
        ("moved weights", 0, many.held),
        ("born", min(place, count), many.accumulated),
        ("reduced", 0, many.reduced),
        *((("arrived", place, many.arrived), ("fresh", place, many.fresh)) if place < count else ()),
    )
    for name, at, array in found:
        if array is not None:
            yield Part(name, at, (array,), ends)


def _moved(memory: MemoryModel, edge: TensorEdge, weight: WeightParts, copied: Bytes | None) -> Iterator[Part]:
    place, layer = memory.lifetimes.position[edge.target], memory.lifetimes.layers[memory.lifetimes.layer[edge.target]]
    found = (
        ("gathered", layer, weight.gathered),
        ("gathered again", layer, weight.again),
        ("copied", layer, copied),
        ("on way", layer, weight.on_way),
        ("on way again", layer, weight.on_way_again),
        ("unreduced", place, weight.unreduced),
        ("sent off", place, weight.sent_off),
        ("last made", place, weight.last_made),
    )
    for name, at, array in found:
        if array is not None:
            yield Part(name, at, (array,), (edge.source, edge.target))


def _alive(intervals: Sequence[Interval], ends: tuple[int, ...], rows: ExpertRows | None) -> Iterator[Part]:
    for each in intervals:
        for uneven_rows in (None,) if rows is None else (None, rows):
            yield Part("alive", each.first, (each.num_bytes,), ends, rows=uneven_rows)
            yield Part("alive", each.end, (each.num_bytes,), ends, rows=uneven_rows, sign=-1)
