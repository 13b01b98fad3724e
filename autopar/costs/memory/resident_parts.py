"""Parts of a device's memory: the bytes of every decision and edge by their role, and the rows that add them up.

The bytes of a plan at one moment are a sum over choices, so that "no more than the limit at moment t" is one memory row
of the problem, and a necessary one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.costs.memory.lifetimes import LATE
from autopar.costs.memory.live import Interval
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import BEHIND, MemoryRow, Moment, Presence, Role, moment_of, presence_of
from autopar.costs.memory.tensor_bytes import Bytes, Modes, uneven_modes
from autopar.costs.plans.decision_rows import ACTIVATIONS, KEPT_WEIGHTS, RECEIVED
from autopar.costs.space.space import ExpertRows, Space, TensorEdge
from autopar.ir.program.recompute_segments import MODES

GRADIENTS, GATHERED, WORKING = "gradients", "gathered weights", "working set"
RETURNED, MOVED, SENT, CONSTANTS = "received gradients", "moved weights", "sent tensors", "constants"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Bytes of a decision or an edge that are resident at the same moments."""

    role: Role
    name: str
    """Name of the bytes in `Plan.memory`."""
    used: int
    """Place of the call that first uses them."""
    modes: Modes
    """Bytes by the strategies at the ends: one array, or one per mode of a segment."""
    ends: tuple[int, ...]
    of: int = 0
    """The decision whose segment says the mode, where that matters."""
    whole: Modes = ()
    """Bytes of what is saved while its segment runs again."""
    until: int = LATE
    """Place from which on they are gone."""
    rows: ExpertRows | None = None
    """Expert rows of which this part adds the bytes beyond an equal share; None to add the bytes themselves.

    If set, the bytes are those of an equal share of these rows.
    """


def node_parts(memory: MemoryModel, number: int) -> tuple[Part, ...]:
    """Return the parts of a decision, made once."""
    found = memory.parts.get(number)
    if found is None:
        found = memory.parts[number] = tuple(_node_parts(memory, number))
    return found


def edge_parts(memory: MemoryModel, edge: TensorEdge) -> tuple[Part, ...]:
    """Return the parts of an edge, made once."""
    found = memory.parts.get(edge.end)
    if found is None:
        found = memory.parts[edge.end] = tuple(_edge_parts(memory, edge))
    return found


def parts_of(memory: MemoryModel) -> Iterator[Part]:
    """Yield all parts of a model."""
    for number in range(len(memory.space.decisions)):
        yield from node_parts(memory, number)
    for edge in memory.space.edges:
        yield from edge_parts(memory, edge)


def _node_parts(memory: MemoryModel, number: int) -> Iterator[Part]:
    more, used, ends = memory.accumulation, memory.lifetimes.position[number], (number,)
    for name, array in memory.stored(number).items():
        yield Part(Role.STORED, name, used, (array,), ends)
    role, name = (Role.RECEIVED, RECEIVED) if more.is_received(number) else (Role.RETURNED, RETURNED)
    works = memory.microbatches.works
    found: list[tuple[Role, str, Bytes | None]] = [
        (role, name, more.buffer(number)),
        (Role.GRADIENT, GRADIENTS, more.gradients(number)),
        (Role.STEPPED, GRADIENTS, memory.gradients(number) if works else None),
        (Role.UPDATING, WORKING, memory.works_on(number)),
    ]
    rows = memory.space.rows.get(number)
    if (travelling := memory.travelling(number)) is not None:
        sent_and_arriving = memory.copies((travelling,), 2)
        yield Part(Role.TRAVELLING, WORKING, used, sent_and_arriving, ends)
        if rows is not None:  # all ranks have equally many tokens of their own
            yield Part(Role.TRAVELLING, WORKING, used, (travelling,), ends, rows=rows)
    if memory.live is not None:
        yield from _some(found[:1], used, ends)
        yield from _alive(memory.live.made(number), ends, rows)
        return
    is_behind = used < LATE and presence_of(memory).moments[list(BEHIND), used].any()
    handed_on = memory.handed_on(number) if is_behind else None
    found += [
        (Role.WORKING_FORWARD, WORKING, memory.working_forward(number)),
        (Role.HANDED_ON, WORKING, handed_on),
    ]
    yield from _some(found, used, ends)
    own, whole = memory.own(number), memory.own(number, with_rerun=True)
    yield from _saved(memory, ACTIVATIONS, number, own, whole, ends, rows)
    if (working := memory.working(number)) is not None:
        yield Part(Role.WORKING, WORKING, used, working, ends, number)
        if rows is not None:
            yield Part(Role.WORKING, WORKING, used, (memory.working_rows(number),), ends, rows=rows)
    if handed_on is not None and rows is not None:
        yield Part(Role.HANDED_ON, WORKING, used, (memory.handed_on_rows(number),), ends, rows=rows)


def _edge_parts(memory: MemoryModel, edge: TensorEdge) -> Iterator[Part]:
    space, used, ends = memory.space, memory.lifetimes.position[edge.target], (edge.source, edge.target)
    if memory.live is not None:
        yield from _alive(memory.live.moved(edge), ends, space.rows_on(edge))
    else:
        saved = memory.edge(edge)
        if saved is not None:
            name = KEPT_WEIGHTS if _brings_weight(space, edge) else ACTIVATIONS
            yield from _saved(memory, name, edge.target, saved, memory.with_rerun(saved), ends, space.rows_on(edge))
    if (sent := memory.accumulation.sent(edge)) is not None:
        yield Part(Role.SENT, SENT, used, sent, ends, edge.source)
    if memory.accumulation.holds(edge):
        yield from _some(_of_many(memory, edge), used, ends)
    if space.is_weight(edge.source) and used < LATE:
        yield from _some(_in_transit(memory, edge), used, ends)


def _some(found: Iterable[tuple[Role, str, Bytes | None]], used: int, ends: tuple[int, ...]) -> Iterator[Part]:
    for role, name, array in found:
        if array is not None:
            yield Part(role, name, used, (array,), ends)


def _of_many(memory: MemoryModel, edge: TensorEdge) -> list[tuple[Role, str, Bytes | None]]:
    """Return the bytes of an edge that are due to micro-batch accumulation."""
    more = memory.accumulation
    return [
        (Role.MOVED, MOVED, more.held(edge)),
        (Role.MOVED, CONSTANTS, more.constant(edge)),
        (Role.GRADIENT, GRADIENTS, more.accumulated(edge)),
        (Role.ARRIVED, GRADIENTS, more.arrived(edge)),
        (Role.FRESH, GRADIENTS, more.fresh(edge)),
        (Role.REDUCED, GRADIENTS, more.reduced(edge)),
    ]


def _in_transit(memory: MemoryModel, edge: TensorEdge) -> list[tuple[Role, str, Bytes | None]]:
    """Return the bytes of a weight or its gradient in transit between storage and use."""
    weights, is_alone = memory.weights, memory.live is not None
    gathered, on_way = weights.gathered(edge), weights.on_way(edge, True)
    return [
        (Role.GATHERED, GATHERED, gathered),
        (Role.GATHERED_AGAIN, GATHERED, gathered if is_alone else weights.gathered_again(edge)),
        (Role.COPIED, GATHERED, weights.arriving(edge) if is_alone else weights.copied_out(edge)),
        (Role.ON_WAY, GATHERED, on_way),
        (Role.ON_WAY_AGAIN, GATHERED, on_way if is_alone else weights.on_way(edge, False)),
        (Role.UNREDUCED, GRADIENTS, weights.unreduced(edge)),
        (Role.SENT_OFF, GRADIENTS, weights.sent_off(edge)),
        (Role.LAST_MADE, GRADIENTS, weights.last_made(edge)),
    ]


def _saved(
    memory: MemoryModel,
    name: str,
    number: int,
    saved: Modes | None,
    whole: Modes | None,
    ends: tuple[int, ...],
    rows: ExpertRows | None,
) -> Iterator[Part]:
    used = memory.lifetimes.position[number]
    if saved is None and whole is None:
        return
    for each in (None,) if rows is None else (None, rows):
        yield Part(Role.SAVED, name, used, saved or (), ends, number, whole or (), rows=each)
        if memory.microbatches.several and saved is not None:
            yield Part(Role.WAITING, name, used, saved, ends, number, rows=each)


def _alive(intervals: Iterable[Interval], ends: tuple[int, ...], rows: ExpertRows | None) -> Iterator[Part]:
    for each in intervals:
        for uneven in (None,) if rows is None else (None, rows):
            yield Part(Role.ALIVE, ACTIVATIONS, each.first, (each.num_bytes,), ends, until=each.end, rows=uneven)


def _brings_weight(space: Space, edge: TensorEdge) -> bool:
    """Return whether a parameter arrives over an edge, also by way of shared reshards."""
    while space.decisions[edge.source].kind == "shared_reshard":
        edge = space.inbound[edge.source, 0]
    return space.is_weight(edge.source)


def resident(presence: Presence, part: Part, at: Moment) -> Modes:
    """Return the bytes of a part for one micro-batch that are resident at a moment, by mode; () if none are."""
    if part.role is not Role.SAVED:
        return part.modes if at.place < part.until and presence.is_resident(part.role, part.used, at) else ()

    def there(offloads: bool) -> Modes:
        if presence.is_resident(Role.WHOLE, part.used, at, offloads):
            return part.whole
        return part.modes if presence.is_resident(Role.SAVED, part.used, at, offloads) else ()

    found, offloaded = there(False), there(True)
    is_same = found is offloaded or len(part.modes) < len(MODES)
    return found if is_same else (*found[:-1], *offloaded[-1:])


def node_bytes(memory: MemoryModel, number: int, row: MemoryRow) -> Modes:
    """Return the bytes of a decision in a row, by strategy; one array per mode of its segment if the mode matters."""
    found = _in_row(memory, [part for part in node_parts(memory, number) if part.rows is None], row)
    return found or (memory.nothing((len(memory.space.decisions[number].candidates.strategies),)),)


def edge_bytes(memory: MemoryModel, edge: TensorEdge, row: MemoryRow) -> Modes | None:
    """Return the bytes of an edge in a row, by the strategies at its ends; one array per mode if the mode matters."""
    return _in_row(memory, [part for part in edge_parts(memory, edge) if part.rows is None], row)


def uneven_node_bytes(memory: MemoryModel, number: int, row: MemoryRow) -> Modes | None:
    """Return the bytes of a call in a row for expert rows above an equal share (see `tensor_bytes.uneven_modes`)."""
    return _in_row(memory, _uneven(memory, node_parts(memory, number)), row)


def uneven_edge_bytes(memory: MemoryModel, edge: TensorEdge, row: MemoryRow) -> Modes | None:
    """Return the bytes of an edge in a row for expert rows above an equal share."""
    return _in_row(memory, _uneven(memory, edge_parts(memory, edge)), row)


def _uneven(memory: MemoryModel, parts: Iterable[Part]) -> list[Part]:
    if memory.live is not None:
        return []
    return [
        replace(
            part, modes=uneven_modes(memory, part.rows, part.modes), whole=uneven_modes(memory, part.rows, part.whole)
        )
        for part in parts
        if part.rows is not None
    ]


def _in_row(memory: MemoryModel, parts: Iterable[Part], row: MemoryRow) -> Modes | None:
    presence, moments = presence_of(memory), []
    for moment, weight in row.weights:
        at, found = moment_of(memory, moment), []
        for part in parts:
            times = presence.times(part.role, at.phase)
            if times and (modes := resident(presence, part, at)):
                found.append(modes if times == 1 else memory.copies(modes, times))
        moments.append((weight, found))
    return memory.total(moments)
