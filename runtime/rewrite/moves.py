"""Collectives that carry out the moves of a reshard path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.costs.pricing.moves import Move
from autopar.ir.sharding.mesh import Mesh, joined_name
from autopar.runtime.collectives import layout_moves


@dataclass(frozen=True, slots=True)
class MoveCall:
    """The collective that carries out a move."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """After the tensor."""
    kwargs: dict[str, Any]


def move_call(move: Move, shape: Sequence[int], mesh: Mesh) -> MoveCall:
    """Return the collective that carries out a move of one axis, or of joined ones."""
    function, args = _function(move, shape, mesh)
    source, target = move.source.zigzag, move.target.zigzag
    if move.source.is_split and move.target.is_split:
        specified = {"zigzag": source, "target_zigzag": target}
    else:
        specified = {"zigzag": source or target}
    return MoveCall(function, args, {name: zigzag for name, zigzag in specified.items() if zigzag})


def _function(move: Move, shape: Sequence[int], mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    axis = joined_name(mesh.names, move.axes)
    source, target = move.source, move.target
    after = move.after.local_shape(shape, mesh.sizes)
    match source.kind, target.kind:
        case "I", "R":
            return layout_moves.all_reduce_gradient, (axis,)
        case "I", "S":
            return layout_moves.split, (axis, target.dim)
        case "I", "P":
            return layout_moves.keep_on_first, (axis,)
        case "R", "S":
            return layout_moves.split_replicated, (axis, target.dim)
        case "R", "I":
            return layout_moves.replicated_to_invariant, (axis,)
        case "R", "P":
            return layout_moves.keep_on_first_both, (axis,)
        case "P", "I":
            return layout_moves.all_reduce, (axis,)
        case "P", "S":
            return layout_moves.reduce_scatter, (axis, target.dim)
        case "S", "R":
            return layout_moves.all_gather, (axis, source.dim, after[source.dim])
        case "S", "I":
            return layout_moves.all_gather_invariant, (axis, source.dim, after[source.dim])
        case "S", "P":
            return layout_moves.scatter, (axis, source.dim, after[source.dim])
        case "S", "S":
            return layout_moves.all_to_all, (axis, source.dim, target.dim, after[source.dim])
    raise AssertionError(f"no collective for {move}")
