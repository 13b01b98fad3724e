"""A move: a change of placement on one mesh axis, or the same on several joined ones; its collectives; all moves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.hardware.overlap import NOTHING, Message
from autopar.costs.pricing.message_sizes import ALONE, Sharing
from autopar.ir.sharding.layout import I, Layout, P, Placement, R, S
from autopar.ir.sharding.mesh import Mesh, joined_name
from autopar.ir.sharding.rearranged import READ_AND_WRITTEN, is_rearranged


@dataclass(frozen=True, slots=True)
class Move:
    """A change of one axis's placement, or the same of several joined ones, with the layouts before and after."""

    axes: tuple[int, ...]
    before: Layout
    after: Layout

    @property
    def source(self) -> Placement:
        return self.before[self.axes[0]]

    @property
    def target(self) -> Placement:
        return self.after[self.axes[0]]

    @property
    def gathers(self) -> bool:
        """True if its forward gathers parts on every rank."""
        return self.source.is_split and self.target in (R, I)

    def num_parts(self, sizes: Sequence[int]) -> int:
        """Return the ranks that take part, on a mesh of these axis sizes."""
        return math.prod(sizes[axis] for axis in self.axes)

    def __str__(self) -> str:
        return f"{self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """Properties of a tensor that determine the cost of a move."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    padded: frozenset[int] = frozenset()
    """Dims that may be split unevenly, padded to equal parts."""
    bucketed: bool = False
    """A parameter: those of its moves that `in_bucket` tells run with others, and share their latency."""
    regather: bool = False
    """A parameter that the backward needs: gathered again there, and not saved in between."""
    viewed: bool = False
    """A weight that is used through views, such as slices.

    To be freed after use, it is gathered in the layout of the views: in another layout it would stay resident.
"""
    view: bool = False
    """Such a view: the weight is gathered before it is taken, never its views."""
    alone: bool = False
    """A weight on its way from a shared reshard to its consumers: no bucket takes it."""
    sharing: Sharing = ALONE
    """Number of parameters that share its messages and the computation that overlaps them, if it is bucketed."""
    ragged: bool = False
    """Rows of experts: what dim 0 holds, and how much, each device knows alone, so that no move splits or joins it."""
    reduced: torch.dtype | None = None
    """A parameter whose gradient is summed in another dtype than its own."""
    fixed: bool = False
    """True if the tensor describes where expert rows are.

    It is valid only on the device that made it, so that no move exists.
    """

    @property
    def is_of_weights(self) -> bool:
        """True if it is a weight, a view of one, or made of weights and summed as their gradients are."""
        return self.bucketed or self.view or self.reduced is not None

    @property
    def may_share_messages(self) -> bool:
        """True if a bucket may take moves of it."""
        return self.bucketed and not self.alone

    def local_bytes(self, layout: Layout, sizes: Sequence[int]) -> int:
        """Return the bytes that each rank holds."""
        return math.prod(layout.local_shape(self.shape, sizes)) * self.dtype.itemsize

    def allows(self, layout: Layout, sizes: Sequence[int]) -> bool:
        """Return whether the layout is valid: split dims divide evenly, or one axis splits them with padding.

        Dims of ragged and fixed tensors may always divide unevenly.
        """
        for dim, size in enumerate(self.shape):
            axes = layout.axes_of(dim)
            parts = math.prod(sizes[axis] for axis in axes)
            padded = not layout.is_zigzag(dim) and dim in self.padded and len(axes) == 1 and size >= parts
            if size % layout.num_pieces(dim, sizes) and not (self.ragged or self.fixed or padded):
                return False
        return True

    def can_move(self, source: Placement, target: Placement) -> bool:
        """Return whether one axis may change its placement from `source` to `target`."""
        if self.view and source.is_split and not target.is_split:
            return False
        if self.viewed and self.regather and self.requires_grad:
            return target is R or (source is I and target.is_split)
        changes_order = source.is_split and source.dim == target.dim  # this resharding gathers the whole tensor
        return not (self.fixed or (self.ragged and S(0) in (source, target)) or changes_order)


def transfers(move: Move, tensor: MovedTensor, mesh: Mesh, regather: bool) -> tuple[Transfer, ...]:
    """Return the collectives of a move, forward and (where a gradient flows, or the weight is gathered again)
    backward.
    """
    size = move.num_parts(mesh.sizes)
    if size == 1:
        return ()
    name = joined_name(mesh.names, move.axes)
    source, target = move.source, move.target
    shapes = [layout.local_shape(tensor.shape, mesh.sizes) for layout in (move.before, move.after)]
    before, after = (math.prod(shape) * tensor.dtype.itemsize for shape in shapes)
    summed = math.prod(shapes[0]) * (tensor.reduced or tensor.dtype).itemsize

    def copied(placement: Placement, num_bytes: int, side: int = 0) -> int:
        return READ_AND_WRITTEN * num_bytes * is_rearranged(shapes[side], placement.dim, placement.zigzag)

    def gather(placement: Placement, num_bytes: int, backward: bool = False) -> Transfer:
        return Transfer("all_gather", name, num_bytes, backward, unpacked=copied(placement, num_bytes))

    def scatter(placement: Placement, num_bytes: int, backward: bool = False) -> Transfer:
        return Transfer("reduce_scatter", name, num_bytes, backward, packed=copied(placement, num_bytes))

    found: list[Transfer] = []
    match source.kind, target.kind:
        case "I", "R":
            found = [Transfer("all_reduce", name, summed, backward=True)]
        case "I", "S":
            found = [gather(target, after * size, backward=True)]
        case "P", "I":
            found = [Transfer("all_reduce", name, before)]
        case "P", "S":
            found = [scatter(target, after * size), gather(target, after * size, backward=True)]
        case "S", "R":
            found = [gather(source, before * size), scatter(source, summed * size, backward=True)]
        case "S", "I":
            found = [gather(source, before * size)]
        case "S", "S":
            # Both dims are padded to whole parts: the input of the forward is as large as that of the backward.
            (axis,) = move.axes
            dims = list(move.before.replace(axis, I).local_shape(tensor.shape, mesh.sizes))
            for dim in (source.dim, target.dim):
                dims[dim] = -(-dims[dim] // size) * size
            exchanged = math.prod(dims) * tensor.dtype.itemsize // size
            there, back = copied(target, exchanged), copied(source, exchanged, 1)
            found = [
                Transfer("all_to_all", name, exchanged, packed=there, unpacked=back),
                Transfer("all_to_all", name, exchanged, backward=True, packed=back, unpacked=there),
            ]
    found = [t for t in found if tensor.requires_grad or not t.backward]
    if regather and is_gather(move, tensor):
        found.append(gather(source, before * size, backward=True))
    return tuple(found)


def is_gather(move: Move, tensor: MovedTensor) -> bool:
    """Return whether the move gathers a parameter for use and reduce-scatters its gradient (if it has one)."""
    return move.source.is_split and (move.target is R or (move.target is I and not tensor.requires_grad))


def makes_parts(move: Move) -> bool:
    """Return whether the move makes parts of a sum of what ranks have alike, which moves nothing."""
    return move.source in (I, R) and move.target is P


Place = Literal["first", "behind a reduction", "later"]
"""A move's place in its path; "behind a reduction" where the first move of the path reduces gradients alone."""


def place_in(moves: Sequence[Move], number: int) -> Place:
    """Return the place of a move in its path."""
    if number == 0:
        return "first"
    return "later" if moves[0].gathers else "behind a reduction"


def in_bucket(move: Move, tensor: MovedTensor, place: Place = "first") -> Message | None:
    """Return the message that the move shares with others (see `costs.space.parameter_buckets`); None if it runs alone.

    Computing hides the first gather of a path, which is issued ahead, and the reduction of its first move, which is
    the last of the backward and left running.
    """
    gathers = is_gather(move, tensor)
    if not tensor.may_share_messages or not (gathers or (move.source is I and move.target is R)):
        return None
    shared, elements = tensor.sharing, math.prod(tensor.shape)
    sizes = elements * tensor.dtype.itemsize, elements * (tensor.reduced or tensor.dtype).itemsize
    behind = shared.overlapped.of_gathers if place == "behind a reduction" else NOTHING
    overlapped = shared.overlapped if place == "first" else behind
    if gathers:
        return Message(shared.gathered, *sizes, 1 + tensor.regather, overlapped)
    return Message(shared.reduced, *sizes, 1, overlapped)


def regathered(moves: Sequence[Move], tensor: MovedTensor) -> tuple[bool, ...]:
    """Return for each move whether it gathers a weight that is freed after use and gathered again for the backward.

    These are the gathers at the end of a path: the backward then needs the gathered weight itself, not a copy.
    """
    found: list[bool] = []
    last = tensor.regather
    for move in reversed(moves):
        gathers = is_gather(move, tensor)
        last = last and (gathers or (move.source is I and move.target is R))
        found.append(last and gathers)
    return tuple(reversed(found))


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Moves between layouts: the positions of the layouts before and after, and equal numbers for equal axes and
    placements.
    """

    layouts: tuple[Layout, ...]
    moves: tuple[Move, ...]
    before: np.ndarray
    after: np.ndarray
    alike: np.ndarray

    def each(self, tensor: MovedTensor, mesh: Mesh, price: Callable[[Move], tuple[float, ...]]) -> np.ndarray:
        """Return what `price` says of every move, a row per number; it is called once for moves that cost the same.

        Moves of the same axes between equal placements move the same bytes where the parts are as large.
        """
        numbers: dict[object, int] = {}
        local = _local_parts(self.layouts, tensor, mesh)
        parts = np.array([numbers.setdefault(each, len(numbers)) for each in local])
        kinds = (self.alike * len(numbers) + parts[self.before]) * len(numbers) + parts[self.after]
        _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
        return np.array([price(self.moves[number]) for number in first], dtype=float)[kind].T


@dataclass(frozen=True, slots=True, eq=False)
class OfMoves:
    """A number of each single move: a layout has few, so that a matrix of all pairs is made when it is needed."""

    moves: Moves
    each: np.ndarray

    def matrix(self, elsewhere: np.ndarray | None = None) -> np.ndarray:
        """Return the numbers by the layouts before and after, with those of a matrix (or 0) where there is no move."""
        count = len(self.moves.layouts)
        found = np.zeros((count, count)) if elsewhere is None else elsewhere.copy()
        found[self.moves.before, self.moves.after] = self.each
        return found


@functools.lru_cache(maxsize=1024)
def moves_among(layouts: tuple[Layout, ...], joined: tuple[tuple[int, ...], ...]) -> Moves:
    """Return every move between two of the layouts."""
    index, known = {layout: i for i, layout in enumerate(layouts)}, {layout: layout for layout in layouts}
    placements = tuple(dict.fromkeys(placement for layout in layouts for placement in layout))
    numbers: dict[tuple[tuple[int, ...], Placement, Placement], int] = {}
    moves = tuple(
        move
        for layout in layouts
        for move in (*_moves(layout, known, placements), *_joined_moves(layout, known, joined))
    )
    ends = np.array([(index[move.before], index[move.after]) for move in moves], dtype=np.intp).reshape(-1, 2)
    alike = [numbers.setdefault((move.axes, move.source, move.target), len(numbers)) for move in moves]
    return Moves(layouts, moves, ends[:, 0], ends[:, 1], np.array(alike, dtype=np.intp))


def _moves(layout: Layout, known: Mapping[Layout, Layout], placements: Sequence[Placement]) -> list[Move]:
    """Return every single-axis change to one of `placements` that touches no dim which a later axis splits.

    It leads to one of the `known` layouts, each of which is one object in all moves.
    """
    found = []
    for axis, source in enumerate(layout):
        split_later = {placement.dim for placement in layout[axis + 1 :] if placement.is_split}
        if source.is_split and source.dim in split_later:
            continue
        for target in placements:
            if target is source or (source is P and target is R):
                continue  # P → R is P → I → R
            if target.is_split and target.dim in split_later:
                continue
            after = known.get(layout.replace(axis, target))
            if after is not None:
                found.append(Move((axis,), layout, after))
    return found


def _joined_moves(layout: Layout, known: Mapping[Layout, Layout], joined: Sequence[tuple[int, ...]]) -> list[Move]:
    """Return every change of joined axes at once: from the innermost that split a dim, or from I on all of them."""
    found = []
    for axes in joined:
        source = layout[axes[0]]
        if source.is_split:
            fits = layout.axes_of(source.dim)[-len(axes) :] == axes
        else:
            fits = all(layout[axis] is I for axis in axes)
        for target in (R, I):
            after = known.get(Layout(target if axis in axes else placement for axis, placement in enumerate(layout)))
            if fits and target is not source and after is not None:
                found.append(Move(axes, layout, after))
    return found


def _local_parts(layouts: Sequence[Layout], tensor: MovedTensor, mesh: Mesh) -> list[tuple[int, ...]]:
    """Return what transfers of a tensor in each layout depend on.

    That is the number of elements, and dims of size 1 in front; where something is padded, the whole local shape.
    """
    shapes = [layout.local_shape(tensor.shape, mesh.sizes) for layout in layouts]
    if tensor.padded and not all(layout.divides(tensor.shape, mesh.sizes) for layout in layouts):
        return shapes
    return [(math.prod(shape), _leading_ones(shape)) for shape in shapes]


def _leading_ones(shape: Sequence[int]) -> int:
    return next((dim for dim, size in enumerate(shape) if size != 1), len(shape))
