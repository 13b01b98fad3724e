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
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from autopar.costs.hardware.collectives import Transfer, rearranging_seconds, transfer_seconds
from autopar.costs.hardware.overlap import Message
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.message_sizes import ALONE
from autopar.costs.pricing.moves import (
    Move,
    MovedTensor,
    OfMoves,
    Place,
    in_bucket,
    makes_parts,
    moves_among,
    place_in,
    regathered,
    transfers,
)
from autopar.costs.pricing.shortest_paths import (
    LOCAL_MOVE_SECONDS,
    Ways,
    ending_in_parts,
    led_by,
    shortest_paths,
    sum_along_paths,
)
from autopar.ir.sharding.layout import I, Layout, P, Placement, R, S, Z
from autopar.ir.sharding.mesh import Mesh

AxisPlacements = frozenset[tuple[int, Placement]]
"""Placements by axis."""
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


class ReshardTable:
    """Shortest paths from all layouts of one kind of tensor that split only `dims` to some of them, its targets.

    `seconds[i, j]` is the cost from the i-th of `layouts` to the j-th target (inf: no way): the less of the paths whose
    moves run alone and, for a parameter, of those whose moves all run in buckets.
    """

    def __init__(
        self,
        layouts: tuple[Layout, ...],
        alone: Ways,
        together: Ways | None,
        tensor: MovedTensor,
        mesh: Mesh,
        hardware: Hardware,
        forward: OfMoves,
        gathers: OfMoves,
    ):
        """`forward` are the seconds of the forward collectives of each single move that runs alone.

        `gathers` says which single moves are gathers, of those in buckets if there are some.
        """
        self.layouts = layouts
        self.index = {layout: i for i, layout in enumerate(layouts)}
        self.column = {layouts[target]: j for j, target in enumerate(alone.targets.tolist())}
        self.seconds = alone.seconds if together is None else np.minimum(alone.seconds, together.seconds)
        self._alone, self._together = alone, together
        self._tensor = tensor
        self._mesh, self._hardware = mesh, hardware
        self._forward, self._gathers = forward, gathers

    @functools.cached_property
    def forward_seconds(self) -> np.ndarray:
        """Seconds of the forward collectives of the paths whose moves run alone; 0 where there is no path."""
        return sum_along_paths(self._alone, self._forward.matrix())

    @functools.cached_property
    def last_gather_seconds(self) -> np.ndarray:
        """Seconds of the last move of each of these paths if it is a gather; else 0."""
        gathers = np.where(self._gathers.matrix(), self._forward.matrix(), 0.0)
        return sum_along_paths(self._alone, gathers, last=True)

    @functools.cached_property
    def reduction_seconds(self) -> np.ndarray:
        """Seconds in which gradients are reduced behind the one gather of each path in buckets.

        0 where a path does not run in buckets, or has another number of gathers. Tensors summed before they are
        gathered are left out: they are summed once, as stored.
        """
        found = np.zeros(self.seconds.shape)
        if self._together is None:
            return found
        here, there, columns = np.arange(len(found))[:, None], self._together.targets, np.arange(len(self.column))
        gathers, following = np.zeros(found.shape, dtype=int), self._together.following
        first_gathers = self._gathers.matrix()[here, following].astype(int)
        together = np.isfinite(self._together.seconds) & (self._together.seconds <= self._alone.seconds)
        own, behind, each = self._reductions
        later = 0
        while (on_way := together & (here != there)).any():
            following = np.where(on_way, following, here)
            reduced = np.where(gathers > 0, each[later][here, following], behind[later][here, following])
            found += np.where(on_way, reduced, 0.0)
            gathers += np.where(on_way, own[here, following], 0)
            here, later = following, 1
            following = self._together.later[first_gathers, here, columns]
        return np.where(gathers == 1, found, 0.0)

    @functools.cached_property
    def _reductions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gathers of single moves; seconds of reductions behind one, and of all, of first moves and of later ones."""
        found = np.zeros((5, len(self.layouts), len(self.layouts)))
        moves = moves_among(self.layouts, tuple(self._mesh.joined.values()))
        found[:, moves.before, moves.after] = moves.each(self._tensor, self._mesh, self._reduced_by)
        return found[0].astype(int), found[1:3], found[3:]

    def _reduced_by(self, move: Move) -> tuple[float, ...]:
        """Return the gathers of a move; seconds of reductions behind them, and of all, if it is first and if not."""
        places: tuple[Place, ...] = ("first", "later")
        messages = [in_bucket(move, self._tensor, place) for place in places]
        if None in messages or not self._tensor.can_move(move.source, move.target):
            return (0.0,) * 5
        found = transfers(move, self._tensor, self._mesh, regather=False)
        names = [each.collective for each in found]
        num_gathers = names.count("all_gather")
        first = names.index("all_gather") if num_gathers else len(found)
        seconds = [
            [transfer_seconds(t, self._mesh, self._hardware, message) * t.backward for t in found]
            for message in messages
        ]
        return (num_gathers, *(sum(each[first:]) for each in seconds), *map(sum, seconds))

    def path(self, source: Layout, target: Layout) -> ReshardPath:
        """Return the cheapest path; the layouts must be connected."""
        here, there, column = self.index[source], self.index[target], self.column[target]
        assert np.isfinite(self.seconds[here, column]), f"no path from {source} to {target} for {self._tensor}"
        seconds, ways = float(self.seconds[here, column]), self._alone
        if self._together is not None and self._together.seconds[here, column] <= seconds:
            ways = self._together
        together = ways is self._together
        moves: list[Move] = []
        while here != there:
            after = int((ways.later[int(moves[0].gathers)] if moves else ways.following)[here, column])
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
    tensor: MovedTensor,
    dims: frozenset[int],
    mesh: Mesh,
    hardware: Hardware,
    zigzag_dims: frozenset[int] = frozenset(),
    left_out: AxisPlacements = frozenset(),
    targets: tuple[Layout, ...] | None = None,
) -> ReshardTable:
    """Return the table of a kind of tensor that splits `dims`, or zigzag-shards some; cached by value.

    `left_out` are placements that an axis does not take: an axis that zigzag-shards a dim never splits it in order.
    `targets` are the layouts that paths lead to; None: all.
    """
    layouts = _layouts(tensor, dims, zigzag_dims, mesh, left_out)
    columns = _positions(layouts, targets, tensor.may_share_messages)
    by_itself = replace(tensor, bucketed=False, alone=False, sharing=ALONE)
    ways, forward, gathers = _alone(by_itself, layouts, columns, mesh, hardware)
    if not tensor.may_share_messages:
        return ReshardTable(layouts, ways, None, tensor, mesh, hardware, forward, gathers)
    in_buckets, gathers = _in_buckets(tensor, layouts, columns, mesh, hardware)
    if tensor.regather:  # a sum of parts among zeros may be faster than a gather, but is saved for the backward
        whole = np.isfinite(in_buckets.seconds) & np.array([P not in layout for layout in layouts])[list(columns)]
        ways = replace(ways, seconds=np.where(whole, np.inf, ways.seconds))
    return ReshardTable(layouts, ways, in_buckets, tensor, mesh, hardware, forward, gathers)


def _positions(layouts: tuple[Layout, ...], targets: tuple[Layout, ...] | None, in_buckets: bool) -> tuple[int, ...]:
    """Return the positions of targets and, for paths in buckets, of what the parts of a sum in them are made of."""
    if targets is None:
        return tuple(range(len(layouts)))
    found, index = set(targets), {layout: i for i, layout in enumerate(layouts)}
    if in_buckets:
        for layout in targets:
            found.update(map(Layout, itertools.product(*((I, R, P) if each is P else (each,) for each in layout))))
    return tuple(sorted(index[layout] for layout in found & index.keys()))


@functools.lru_cache(maxsize=4096)
def _alone(
    tensor: MovedTensor, layouts: tuple[Layout, ...], columns: tuple[int, ...], mesh: Mesh, hardware: Hardware
) -> tuple[Ways, OfMoves, OfMoves]:
    """Return the paths whose moves run alone, the forward seconds of each single move, and which of these gather."""
    seconds, forward, copies, gathers = _moves_alone(tensor, layouts, mesh, hardware)
    ways = shortest_paths(seconds.matrix(_nowhere(len(layouts))), np.array(columns, dtype=np.int32))
    if copies.each.any():
        ways = replace(ways, seconds=ways.seconds + (1 - COPY_TIE) * sum_along_paths(ways, copies.matrix()))
    return ways, forward, gathers


def _moves_alone(
    tensor: MovedTensor, layouts: tuple[Layout, ...], mesh: Mesh, hardware: Hardware
) -> tuple[OfMoves, ...]:
    """Return seconds of single moves that run alone, those of the forward and of copies, and which gather."""

    def price(move: Move) -> tuple[float, ...]:
        if not tensor.can_move(move.source, move.target):
            return math.inf, 0.0, 0.0, 0.0
        found = transfers(move, tensor, mesh, tensor.regather)
        each = [transfer_seconds(t, mesh, hardware) for t in found]
        copied = sum(rearranging_seconds(t, hardware) for t in found)
        there = sum(seconds for t, seconds in zip(found, each, strict=True) if not t.backward)
        return sum(each) - (1 - COPY_TIE) * copied + LOCAL_MOVE_SECONDS, there, copied, move.gathers

    moves = moves_among(layouts, ())
    return tuple(OfMoves(moves, each) for each in moves.each(tensor, mesh, price))


def _in_buckets(
    tensor: MovedTensor, layouts: tuple[Layout, ...], columns: tuple[int, ...], mesh: Mesh, hardware: Hardware
) -> tuple[Ways, OfMoves]:
    """Return the paths whose moves all run in buckets, and which single moves gather."""

    def price(move: Move) -> tuple[float, ...]:
        if not tensor.can_move(move.source, move.target):
            return math.inf, math.inf, math.inf, 0.0, 0.0
        found = transfers(move, tensor, mesh, tensor.regather)
        seconds = [
            math.inf
            if (message := in_bucket(move, tensor, place)) is None
            else sum(transfer_seconds(t, mesh, hardware, message) for t in found) + LOCAL_MOVE_SECONDS
            for place in get_args(Place)
        ]
        return (*seconds, move.gathers, makes_parts(move))

    moves, nowhere = moves_among(layouts, tuple(mesh.joined.values())), _nowhere(len(layouts))
    *seconds, gathers, to_parts = (OfMoves(moves, each) for each in moves.each(tensor, mesh, price))
    first, *others = (each.matrix(nowhere) for each in seconds)
    targets, parts = np.array(columns, dtype=np.int32), np.argwhere(to_parts.matrix())
    on = [ending_in_parts(shortest_paths(each, targets), parts, layouts) for each in others]
    return led_by(first, gathers.matrix().astype(bool), on), gathers


def _nowhere(count: int) -> np.ndarray:
    """Return the seconds between so many layouts without any move."""
    found = np.full((count, count), np.inf)
    np.fill_diagonal(found, 0.0)
    return found


@functools.lru_cache(maxsize=4096)
def _layouts(
    tensor: MovedTensor, dims: frozenset[int], zigzag_dims: frozenset[int], mesh: Mesh, left_out: AxisPlacements
) -> tuple[Layout, ...]:
    """Return every layout of the tensor that splits only `dims` and zigzag-shards only those of `zigzag_dims`."""
    kinds = (I, R, P) if tensor.requires_grad else (I, P)
    placements = (*kinds, *(S(dim) for dim in sorted(dims)), *(Z(dim) for dim in sorted(zigzag_dims)))
    of_axes = ([each for each in placements if (axis, each) not in left_out] for axis in range(mesh.ndim))
    candidates = (Layout(each) for each in itertools.product(*of_axes))
    return tuple(layout for layout in candidates if tensor.allows(layout, mesh.sizes))
