"""The cheapest way from one layout to another: a shortest path over moves.

A move changes the placement of one mesh axis (the table in the module docstring of `layout` and its transposes).
One path says what it costs, forward and backward, and which nodes the rewrite inserts.
Only the innermost axis that splits a dim can be gathered alone, so a move never touches a dim that a later axis splits.
Paths are the shortest by their messages. The device's copies for these are priced on top: no path goes by way of
another dim, and moves more, to save a copy.

In buckets, one collective over joined axes does what parameters need most: I … I → R … R, and S(d) … S(d) → R … R (I
where no gradient flows) of the innermost axes that split d, whose parts then lie in the order of the ranks. A path in
buckets may end in parts of a sum, which move nothing. Computing hides the collectives of a path's first move alone, and
the first gather behind it where that reduces gradients (`moves.in_bucket`), so that a second one may cost more than it
saves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from autopar.costs.hardware.collectives import Transfer, rearranging_seconds, transfer_seconds
from autopar.costs.hardware.overlap import Message
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.moves import (
    Move,
    MovedTensor,
    Place,
    in_bucket,
    makes_parts,
    place_in,
    regathered,
    transfers,
)
from autopar.ir.sharding.layout import I, Layout, P, Placement, R, S, Z
from autopar.ir.sharding.mesh import Mesh

LOCAL_MOVE_SECONDS = 1e-9  # breaks ties in favour of fewer moves; far below any real cost
COPY_TIE = 1e-6  # weight of copies: breaks ties between paths with equal messages


@dataclass(frozen=True, slots=True)
class ReshardPath:
    """Moves from one layout to another; `seconds` is forward and backward together."""

    moves: tuple[Move, ...]
    regathered: tuple[bool, ...]
    """True for each move that runs again in the backward."""
    seconds: float
    """Seconds as the planner prices the path.

    A gather that another kind of move follows counts twice, though it runs once.
    """
    transfers: tuple[Transfer, ...]
    together: bool
    """True if moves run in buckets: all but those at the end that make parts of a sum.

    The runtime keeps paths with another kind of move out of the buckets.
    """
    messages: tuple[Message | None, ...]
    """Message that each transfer shares with others; None if the transfer runs alone."""

    def __str__(self) -> str:
        if not self.moves:
            return "-"
        return " → ".join(str(layout) for layout in (*(move.before for move in self.moves), self.moves[-1].after))


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """The shortest distances, the next layout on the way from i to j, and on the way on from there."""

    seconds: np.ndarray
    following: np.ndarray
    later: np.ndarray
    """Two of them: behind a first move that does not gather, and behind one that does."""


class ReshardTable:
    """All-pairs shortest paths between the layouts of one kind of tensor that split only `dims`.

    `seconds[i, j]` is the cost between the i-th and j-th layout of `layouts` (inf: no way): the less of the paths whose
    moves run alone and, for a parameter, of those whose moves all run in buckets.
    """

    def __init__(
        self,
        layouts: tuple[Layout, ...],
        alone: _Ways,
        together: _Ways | None,
        tensor: MovedTensor,
        mesh: Mesh,
        hardware: Hardware,
        forward: np.ndarray,
        gathers: np.ndarray,
    ):
        """`forward` are the seconds of the forward collectives of each single move that runs alone.

        `gathers` says which of them are gathers.
        """
        self.layouts = layouts
        self.index = {layout: i for i, layout in enumerate(layouts)}
        self.seconds = alone.seconds if together is None else np.minimum(alone.seconds, together.seconds)
        self._alone, self._together = alone, together
        self._tensor = tensor
        self._mesh, self._hardware = mesh, hardware
        self._forward, self._gathers = forward, gathers

    @functools.cached_property
    def forward_seconds(self) -> np.ndarray:
        """Seconds of the forward collectives of the paths whose moves run alone; 0 where there is no path."""
        return _sum_along_paths(self._alone, self._forward)

    @functools.cached_property
    def last_gather_seconds(self) -> np.ndarray:
        """Seconds of the last move of each of these paths if it is a gather; else 0."""
        return _sum_along_paths(self._alone, np.where(self._gathers, self._forward, 0.0), last=True)

    @functools.cached_property
    def reduction_seconds(self) -> np.ndarray:
        """Seconds in which gradients are reduced behind the one gather of each path in buckets.

        0 where a path does not run in buckets, or has another number of gathers. Tensors summed before they are
        gathered are left out: they are summed once, as stored.
        """
        found = np.zeros(self.seconds.shape)
        if self._together is None:
            return found
        there = np.broadcast_to(np.arange(len(found)), found.shape)
        here, gathers, following = there.T, np.zeros(found.shape, dtype=int), self._together.following
        first_gathers = self._gathers[here, following].astype(int)
        together = np.isfinite(self._together.seconds) & (self._together.seconds <= self._alone.seconds)
        own, behind, each = self._reductions
        later = 0
        while (on_way := together & (here != there)).any():
            following = np.where(on_way, following, here)
            reduced = np.where(gathers > 0, each[later][here, following], behind[later][here, following])
            found += np.where(on_way, reduced, 0.0)
            gathers += np.where(on_way, own[here, following], 0)
            here, later = following, 1
            following = self._together.later[first_gathers, here, there]
        return np.where(gathers == 1, found, 0.0)

    @functools.cached_property
    def _reductions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gathers of single moves; seconds of reductions behind one, and of all, of first moves and of later ones."""
        gathers = np.zeros(self.seconds.shape, dtype=int)
        behind, every = np.zeros((2, *gathers.shape)), np.zeros((2, *gathers.shape))
        local = _local_parts(self.layouts, self._tensor, self._mesh)
        known: dict[object, tuple[int, list[float], list[float]]] = {}
        for i, j, alike, move in _moves_among(self.layouts, tuple(self._mesh.joined.values())):
            kind = alike, local[i], local[j]
            if kind not in known:
                known[kind] = self._reduced_by(move)
            gathers[i, j], behind[:, i, j], every[:, i, j] = known[kind]
        return gathers, behind, every

    def _reduced_by(self, move: Move) -> tuple[int, list[float], list[float]]:
        """Return the gathers of a move; seconds of reductions behind them, and of all, if it is first and if not."""
        places: tuple[Place, ...] = ("first", "later")
        messages = [in_bucket(move, self._tensor, place) for place in places]
        if None in messages or not self._tensor.can_move(move.source, move.target):
            return 0, [0.0, 0.0], [0.0, 0.0]
        found = transfers(move, self._tensor, self._mesh, regather=False)
        names = [each.collective for each in found]
        num_gathers = names.count("all_gather")
        first = names.index("all_gather") if num_gathers else len(found)
        seconds = [
            [transfer_seconds(t, self._mesh, self._hardware, message) * t.backward for t in found]
            for message in messages
        ]
        return num_gathers, [sum(each[first:]) for each in seconds], [sum(each) for each in seconds]

    def path(self, source: Layout, target: Layout) -> ReshardPath:
        """Return the cheapest path; the layouts must be connected."""
        here, there = self.index[source], self.index[target]
        assert np.isfinite(self.seconds[here, there]), f"no path from {source} to {target} for {self._tensor}"
        seconds, ways = float(self.seconds[here, there]), self._alone
        if self._together is not None and self._together.seconds[here, there] <= seconds:
            ways = self._together
        together = ways is self._together
        moves: list[Move] = []
        while here != there:
            after = int((ways.later[int(moves[0].gathers)] if moves else ways.following)[here, there])
            before_layout, after_layout = self.layouts[here], self.layouts[after]
            axes = tuple(a for a in range(len(before_layout)) if before_layout[a] is not after_layout[a])
            moves.append(Move(axes, before_layout, after_layout))
            here = after
        again = regathered(moves, self._tensor)
        moved = [
            (t, in_bucket(move, self._tensor, place_in(moves, number)) if together else None)
            for number, (move, twice) in enumerate(zip(moves, again, strict=True))
            for t in transfers(move, self._tensor, self._mesh, twice)
        ]
        collectives, messages = tuple(t for t, _ in moved), tuple(shared for _, shared in moved)
        return ReshardPath(tuple(moves), again, seconds, collectives, together, messages)


@functools.lru_cache(maxsize=4096)
def reshard_table(
    tensor: MovedTensor, dims: frozenset[int], mesh: Mesh, hardware: Hardware, zigzag_dims: frozenset[int] = frozenset()
) -> ReshardTable:
    """Return the table of a kind of tensor that splits `dims`, or zigzag-shards some; cached by value."""
    layouts = _layouts(tensor, dims, zigzag_dims, mesh)
    local = _local_parts(layouts, tensor, mesh)
    alone = np.full((len(layouts), len(layouts)), np.inf)
    np.fill_diagonal(alone, 0.0)
    first, behind, later = alone.copy(), alone.copy(), alone.copy()
    forward, copies = np.zeros_like(alone), np.zeros_like(alone)
    gathers = np.zeros(alone.shape, dtype=bool)
    priced: dict[object, tuple[float, ...]] = {}
    messages_of: dict[int, list[Message | None]] = {}
    to_parts: list[tuple[int, int]] = []
    joined = tuple(mesh.joined.values()) if tensor.may_share_messages else ()
    for i, j, alike, move in _moves_among(layouts, joined):
        if not tensor.can_move(move.source, move.target):
            continue
        # Moves of the same axes between equal placements move the same bytes where the parts are as large.
        kind = (alike, local[i], local[j])
        if kind not in priced:
            found = transfers(move, tensor, mesh, tensor.regather)
            each = [] if move.is_joined else [transfer_seconds(t, mesh, hardware) for t in found]
            copied = 0.0 if move.is_joined else sum(rearranging_seconds(t, hardware) for t in found)
            by_itself = math.inf if move.is_joined else sum(each) - (1 - COPY_TIE) * copied
            there = sum(s for t, s in zip(found, each, strict=False) if not t.backward)
            if alike not in messages_of:
                messages_of[alike] = [in_bucket(move, tensor, place) for place in get_args(Place)]
            in_it = [
                math.inf if each is None else sum(transfer_seconds(t, mesh, hardware, each) for t in found)
                for each in messages_of[alike]
            ]
            priced[kind] = (*(each + LOCAL_MOVE_SECONDS for each in (by_itself, *in_it)), there, copied)
        alone[i, j], first[i, j], behind[i, j], later[i, j], forward[i, j], copies[i, j] = priced[kind]
        gathers[i, j] = move.gathers
        if makes_parts(move):
            to_parts.append((i, j))
    ways = _all_pairs(alone)
    if copies.any():
        ways = _Ways(ways.seconds + (1 - COPY_TIE) * _sum_along_paths(ways, copies), ways.following, ways.later)
    if not tensor.may_share_messages:
        return ReshardTable(layouts, ways, None, tensor, mesh, hardware, forward, gathers)
    on = [_ending_in_parts(_all_pairs(each), to_parts, layouts) for each in (behind, later)]
    in_buckets = _led_by(first, gathers, on)
    if tensor.regather:  # a sum of parts among zeros may be faster than a gather, but is saved for the backward
        whole = np.isfinite(in_buckets.seconds) & np.array([P not in layout for layout in layouts])
        ways = _Ways(np.where(whole, np.inf, ways.seconds), ways.following, ways.later)
    return ReshardTable(layouts, ways, in_buckets, tensor, mesh, hardware, forward, gathers)


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


def _layouts(tensor: MovedTensor, dims: frozenset[int], zigzag_dims: frozenset[int], mesh: Mesh) -> tuple[Layout, ...]:
    """Return every layout of the tensor that splits only `dims` and zigzag-shards only those of `zigzag_dims`."""
    kinds = (I, R, P) if tensor.requires_grad else (I, P)
    placements = (*kinds, *(S(dim) for dim in sorted(dims)), *(Z(dim) for dim in sorted(zigzag_dims)))
    candidates = (Layout(each) for each in itertools.product(placements, repeat=mesh.ndim))
    return tuple(layout for layout in candidates if tensor.allows(layout, mesh.sizes))


@functools.lru_cache(maxsize=1024)
def _moves_among(
    layouts: tuple[Layout, ...], joined: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, int, int, Move], ...]:
    """Return every move between two of the layouts: their indices, a number for axes and placements, and the move."""
    index = {layout: i for i, layout in enumerate(layouts)}
    placements = tuple(dict.fromkeys(placement for layout in layouts for placement in layout))
    numbers: dict[tuple[tuple[int, ...], Placement, Placement], int] = {}
    return tuple(
        (i, index[move.after], numbers.setdefault((move.axes, move.source, move.target), len(numbers)), move)
        for i, layout in enumerate(layouts)
        for move in (*_moves(layout, index, placements), *_joined_moves(layout, index, joined))
    )


def _moves(layout: Layout, allowed: Mapping[Layout, int], placements: Sequence[Placement]) -> list[Move]:
    """Return every single-axis change to one of `placements` that touches no dim which a later axis splits."""
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
            after = layout.replace(axis, target)
            if after in allowed:
                found.append(Move((axis,), layout, after))
    return found


def _joined_moves(layout: Layout, allowed: Mapping[Layout, int], joined: Sequence[tuple[int, ...]]) -> list[Move]:
    """Return every change of joined axes at once: from the innermost that split a dim, or from I on all of them."""
    found = []
    for axes in joined:
        source = layout[axes[0]]
        if source.is_split:
            fits = layout.axes_of(source.dim)[-len(axes) :] == axes
        else:
            fits = all(layout[axis] is I for axis in axes)
        for target in (R, I):
            after = Layout(target if axis in axes else placement for axis, placement in enumerate(layout))
            if fits and target is not source and after in allowed:
                found.append(Move(axes, layout, after))
    return found


def _sum_along_paths(ways: _Ways, each: np.ndarray, last: bool = False) -> np.ndarray:
    """Sum something over the single moves on each way, or take the last one's; 0 where there is no way."""
    there = np.broadcast_to(np.arange(len(each)), each.shape)
    here, total = there.T, np.zeros(each.shape)
    while True:
        on_way = np.isfinite(ways.seconds) & (here != there)
        if not on_way.any():
            return total
        following = np.where(on_way, ways.following[here, there], here)
        total += np.where(on_way & (following == there) if last else on_way, each[here, following], 0.0)
        here = following


def _all_pairs(seconds: np.ndarray) -> _Ways:
    """Find the fastest path between all pairs of layouts (Floyd and Warshall)."""
    distance = seconds.copy()
    following = np.tile(np.arange(len(distance), dtype=np.int32), (len(distance), 1))
    through, better = np.empty_like(distance), np.empty(distance.shape, dtype=bool)
    for middle in range(len(distance)):
        np.add(distance[:, middle, None], distance[None, middle, :], out=through)
        np.less(through, distance, out=better)
        np.copyto(distance, through, where=better)
        np.copyto(following, following[:, middle, None].copy(), where=better)
    return _Ways(distance, following, np.stack([following, following]))


def _ending_in_parts(ways: _Ways, to_parts: Sequence[tuple[int, int]], layouts: Sequence[Layout]) -> _Ways:
    """Return the paths that may go on by moves that make parts of a sum, between layouts of these positions."""
    seconds, following = ways.seconds.copy(), ways.following.copy()
    for before, after in sorted(to_parts, key=lambda each: list(layouts[each[1]]).count(P)):
        through = seconds[:, before] + LOCAL_MOVE_SECONDS
        better = through < seconds[:, after]
        seconds[better, after] = through[better]
        following[better, after] = following[better, before]
        if better[before]:
            following[before, after] = after
    return _Ways(seconds, following, ways.later)


def _led_by(leading: np.ndarray, gathers: np.ndarray, on: Sequence[_Ways]) -> _Ways:
    """Return the paths that go `on` behind a first move of other seconds, which does not gather, or does."""
    distance, leading = np.full_like(leading, np.inf), leading.copy()
    np.fill_diagonal(distance, 0.0)
    np.fill_diagonal(leading, np.inf)  # to stay is no move
    seconds = np.stack([each.seconds for each in on])
    first = np.tile(np.arange(len(distance), dtype=np.int32), (len(distance), 1))
    through, better = np.empty_like(distance), np.empty(distance.shape, dtype=bool)
    for after in range(len(distance)):
        np.add(leading[:, after, None], seconds[gathers[:, after].astype(int), after], out=through)
        np.less(through, distance, out=better)
        np.copyto(distance, through, where=better)
        first[better] = after
    return _Ways(distance, first, np.stack([each.following for each in on]))
