"""Parts of a device's memory: the bytes of every decision and edge by their role, and the rows that add them up.

Bytes that several micro-batches share (`_held`), and those of weights and gradients between storage and
use (`_in_transit`), are stated here, one line for each role; `model` and `live` give what calls save and work on.

The bytes of a plan at one moment are a sum over choices, so that "no more than the limit at moment t" is one memory row
of the problem, and a necessary one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.costs.memory.lifetimes import LATE, Place
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import BEHIND, MemoryRow, Part, Role
from autopar.costs.memory.tensor_bytes import SAME, Bytes, Modes, shared, uneven_modes
from autopar.costs.plans.decision_rows import ACTIVATIONS, KEPT_WEIGHTS
from autopar.costs.space.space import ExpertRows, Space, TensorEdge
from autopar.ir.program.recompute_segments import MODES

CONSTANTS = "constants"


def parts_of(memory: MemoryModel, place: Place) -> tuple[Part, ...]:
    """Return the parts of a decision or an edge, made once."""
    if isinstance(place, int):
        return memory.cached(("parts", place), lambda: tuple(_node_parts(memory, place)))
    return memory.cached(("parts", place.end), lambda: tuple(_edge_parts(memory, place)))


def all_parts(memory: MemoryModel) -> Iterator[Part]:
    """Yield all parts of a model."""
    for place in (*range(len(memory.space.decisions)), *memory.space.edges):
        yield from parts_of(memory, place)


def gathers_weights(memory: MemoryModel, choices: Sequence[int]) -> bool:
    """Return whether any weight is gathered during a step under these choices."""
    weights = (edge for edge in memory.space.edges if _is_in_transit(memory, edge))
    on_way = ((edge, _in_transit(memory, edge).get(Role.ON_WAY)) for edge in weights)
    return any(taken is not None and taken[choices[edge.source], choices[edge.target]] for edge, taken in on_way)


def _node_parts(memory: MemoryModel, number: int) -> Iterator[Part]:
    more, used, ends = memory.accumulation, memory.lifetimes.position[number], (number,)
    rows = memory.space.rows.get(number)
    for name, array in memory.stored(number).items():
        yield Part(Role.STORED, name, used, (array,), ends)
    buffer = Role.RECEIVED if more.is_received(number) else Role.RETURNED
    found = {buffer: more.buffer(number)}
    if (travelling := memory.tensors.travelling(number)) is not None:
        found[Role.TRAVELLING] = memory.tensors.applied(np.multiply, travelling, 2)
        if rows is not None:  # all ranks have equally many tokens of their own
            yield Part(Role.TRAVELLING, Role.TRAVELLING.label, used, (travelling,), ends, rows=rows)
    if memory.live is not None:
        yield from _of_roles(found, used, ends)
        yield from _and_uneven(memory.live.made(number), rows)
        return
    gradients = memory.tensors.gradients(number)
    is_behind = used < LATE and memory.presence.moments[list(BEHIND), used].any()
    found |= {
        Role.GRADIENT: None if more.adds_up(number) else gradients,
        Role.STEPPED: gradients if memory.microbatches.works else None,
        Role.UPDATING: memory.works_on(number),
        Role.WORKING_FORWARD: memory.saved.working_forward(number),
        Role.HANDED_ON: memory.saved.handed_on(number) if is_behind else None,
    }
    yield from _of_roles(found, used, ends)
    working, whole = memory.saved.working(number), memory.saved.own(number, with_rerun=True)
    yield from _and_uneven(_saved(memory, ACTIVATIONS, memory.saved.own(number), whole, ends), rows)
    if working is not None:
        yield Part(Role.WORKING, Role.WORKING.label, used, working, ends, number)
    if rows is not None:
        of_rows = {Role.WORKING: None if working is None else memory.saved.working_rows(number)}
        of_rows[Role.HANDED_ON] = None if found[Role.HANDED_ON] is None else memory.saved.handed_on_rows(number)
        yield from (replace(part, rows=rows) for part in _of_roles(of_rows, used, ends))


def _edge_parts(memory: MemoryModel, edge: TensorEdge) -> Iterator[Part]:
    space, used, ends = memory.space, memory.lifetimes.position[edge.target], (edge.source, edge.target)
    if memory.live is not None:
        yield from _and_uneven(memory.live.moved(edge), space.rows_on(edge))
    elif (saved := memory.saved.edge(edge)) is not None:
        name = KEPT_WEIGHTS if _brings_weight(space, edge) else ACTIVATIONS
        parts = _saved(memory, name, saved, memory.saved.with_rerun(saved), ends)
        yield from _and_uneven(parts, space.rows_on(edge))
    if (sent := memory.accumulation.sent(edge)) is not None:
        yield Part(Role.SENT, Role.SENT.label, used, sent, ends, edge.source)
    if (constant := memory.accumulation.constant(edge)) is not None:
        yield Part(Role.MOVED, CONSTANTS, used, (constant,), ends)
    elif memory.accumulation.holds(edge) and edge.source not in memory.accumulation.constants:
        kinds, casts = [space.decisions[end].kind for end in ends], map(memory.accumulation.is_cast, ends)
        yield from _of_roles(_held(memory, edge, tuple(kinds), tuple(casts)), used, ends)
    if _is_in_transit(memory, edge):
        yield from _of_roles(_in_transit(memory, edge), used, ends)


def _of_roles(found: Mapping[Role, Bytes | None], used: int, ends: tuple[int, ...]) -> Iterator[Part]:
    for role, array in found.items():
        if array is not None:
            yield Part(role, role.label, used, (array,), ends)


def _by_role(make: Callable[..., Iterator[tuple[Role, Bytes]]]) -> Callable[..., Mapping[Role, Bytes]]:
    """Let a function of a model and an edge be `shared`, and return what it yields that is not zero."""
    return shared(lambda *query: {role: array for role, array in make(*query) if array.any()})


@_by_role
def _held(
    memory: MemoryModel, edge: TensorEdge, kinds: tuple[str, str], casts: tuple[bool, bool]
) -> Iterator[tuple[Role, Bytes]]:
    """Yield the bytes of a weight, or a view of one, that several micro-batches share, and of its gradient.

    They follow from the kinds of the decisions at both ends, and from which of them cast a weight. The gradient of a
    view is counted where the view is taken, that of a cast where it is cast.
    """
    (source, target), (is_cast, is_cast_next) = kinds, casts
    runs, dtype, tensors = memory.microbatches, edge.tensor.dtype, memory.tensors
    changes = (tensors.kinds(edge) != SAME) | tensors.reduced(edge)
    before, after = _at_ends(memory, edge)
    again, each_time = memory.accumulation.each_time(edge), memory.accumulation.reduced_each_time(edge)
    whole, parts = (memory.space.program.accumulates(dtype, is_reduced) for is_reduced in (False, True))
    if not is_cast_next:
        own = before if is_cast or (runs.stashes and source == "parameter") else np.zeros_like(before)
        moved = np.where(again, own * runs.stashes, np.where(tensors.stays(edge), own, after))
        yield Role.MOVED, moved * (runs.in_flight if runs.stashes else 1)
    if not edge.tensor.requires_grad:
        return
    if source == "parameter":
        is_other = is_cast_next | np.where(each_time, parts != dtype, whole != dtype)
        yield Role.REDUCED, np.where(is_other | (changes & ~each_time), before, 0)
    if is_cast_next or edge.tensor.view:
        return
    added_up = after // dtype.itemsize * whole.itemsize
    if source == "shared_reshard":  # if it stays unchanged, it was added up before
        yield Role.GRADIENT, np.where(changes, added_up, 0)
    else:
        yield Role.GRADIENT, np.where(each_time, before // dtype.itemsize * parts.itemsize, added_up)
    yield Role.ARRIVED, np.where(each_time, before, 0)
    if target == "call":
        yield Role.FRESH, np.where(each_time, 0, after)


def _is_in_transit(memory: MemoryModel, edge: TensorEdge) -> bool:
    return memory.space.is_weight(edge.source) and memory.lifetimes.position[edge.target] < LATE


@_by_role
def _in_transit(memory: MemoryModel, edge: TensorEdge) -> Iterator[tuple[Role, Bytes]]:
    """Yield the bytes of a weight and of its gradient on their way between storage and use, by role.

    Weights on their way are counted whole, though of several gathers only the first is issued ahead. Weights that are
    gathered alone are freed one by one, yet all count while their layer runs.
    """
    (before, after), tensor, more = _at_ends(memory, edge), edge.tensor, memory.accumulation
    moves, again, is_shared = memory.tensors.communicated(edge), more.each_time(edge), more.holds(edge)
    gathered = moves & again if is_shared else moves
    again = again if memory.live is None else gathered
    saved = np.array([strategy.saved for strategy in memory.space.decisions[edge.source].candidates.strategies])
    freed = gathered & ~saved[:, None]  # else it counts as saved
    yield Role.GATHERED, np.where(freed, after, 0)
    yield Role.GATHERED_AGAIN, np.where(again if memory.live is None else freed, after, 0)
    if again.any():
        yield Role.COPIED, np.where(again & ~memory.tensors.gathered_alone(edge), after, 0)
    only_gathers, on_way = memory.tensors.only_gathers(edge), before + after
    yield Role.ON_WAY, np.where(gathered & only_gathers, on_way, 0)
    yield Role.ON_WAY_AGAIN, np.where(again & only_gathers, on_way, 0)
    if not tensor.requires_grad:
        return
    each_time = more.reduced_each_time(edge) if is_shared else np.array(True)
    sums = (moves | memory.tensors.reduced(edge)) & each_time
    yield Role.UNREDUCED, np.where(sums, after, 0)
    if tensor.reduced is not None:
        sent = np.where(sums, after // tensor.dtype.itemsize * tensor.reduced.itemsize, 0)
        yield Role.LAST_MADE, sent
        yield Role.SENT_OFF, sent
    elif (moves & each_time).any():  # a tensor that is only reduced stays in its send buffer
        yield Role.LAST_MADE, np.where(moves & each_time, after, 0)
        yield Role.SENT_OFF, np.where(moves & each_time & ~memory.tensors.sent_alone(edge), after, 0)


def _at_ends(memory: MemoryModel, edge: TensorEdge) -> tuple[Bytes, Bytes]:
    before, after = memory.tensors.bytes_at_ends(edge)
    return before[:, None], after[None, :]


def _saved(
    memory: MemoryModel, name: str, saved: Modes | None, whole: Modes | None, ends: tuple[int, ...]
) -> Iterator[Part]:
    """Yield the parts of what is saved for a backward, and is `whole` while its segment runs again."""
    number = ends[-1]
    found: list[tuple[Role, Modes | None]] = [(Role.WAITING, saved)] * memory.microbatches.several
    for role, offloading, modes in ((Role.SAVED, Role.OFFLOADED, saved), (Role.WHOLE, Role.OFFLOADING, whole)):
        if modes is not None and memory.lifetimes.num_modes(number) == len(MODES):
            *others, last = modes * (len(MODES) // len(modes))
            nothing = memory.tensors.nothing(last.shape)
            found += [(role, (*others, nothing)), (offloading, (*[nothing] * len(others), last))]
        else:
            found.append((role, modes))
    for role, modes in found:
        if modes is not None:
            yield Part(role, name, memory.lifetimes.position[number], modes, ends, number)


def _and_uneven(parts: Iterable[Part], rows: ExpertRows | None) -> Iterator[Part]:
    """Yield parts; if they are expert rows, each with what it takes beyond an equal share."""
    for part in parts:
        yield part
        if rows is not None:
            yield replace(part, rows=rows)


def _brings_weight(space: Space, edge: TensorEdge) -> bool:
    """Return whether a parameter arrives over an edge, also by way of shared reshards."""
    while space.decisions[edge.source].kind == "shared_reshard":
        edge = space.inbound[edge.source, 0]
    return space.is_weight(edge.source)


def bytes_in(memory: MemoryModel, place: Place, row: MemoryRow, uneven: bool = False) -> Modes | None:
    """Return the bytes of a decision or an edge in a row, by the strategies at its ends; None if there are none.

    There is one array per mode of its segment, if the mode matters. If `uneven`, the bytes are those of expert rows
    above an equal share (see `tensor_bytes.uneven_modes`), else all others.
    """
    presence, found = memory.presence, []
    parts = [part for part in parts_of(memory, place) if (part.rows is not None) == uneven]
    for moment, weight in row.weights:
        at = presence.moment(moment)
        for part in parts if memory.live is None or not uneven else ():
            times = presence.times(part.role, at.phase)
            if times and presence.is_resident(part, at):
                modes = part.modes if part.rows is None else uneven_modes(memory.tensors, part.rows, part.modes)
                found.append((weight * times, modes))
    return memory.tensors.total(found)
