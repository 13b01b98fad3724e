"""Products by a weight that is gathered a tile at a time, in the layouts of `strategies`' rule for them.

Ranks have other rows of the input, and parts of one weight: of its columns (O), or of its rows (K). A tile has a slice
of every rank's part. While it is multiplied by, the next is on its way; backward, the gradient of the one before, too.

Legend: M rows of this rank, K features, O columns, n ranks, C of a rank's part in a tile.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, autograd

from autopar.ir.program.operators.derivatives import is_requested, once_differentiable
from autopar.runtime.collectives.in_chunks import arrived, start_gather, start_reduce_scatter
from autopar.runtime.collectives.mesh_axes import Axes, Axis, axes_of
from autopar.strategies.rules.products.tiled import COLUMN, ROW, tile_sizes


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `aten.linear.default` in tiles of the weight.

    Moves the weight's whole bytes, and backward up to twice as many.
    """
    product = _InTiles.apply(x, weight, _way(weight, axes))
    return product if bias is None else product + bias


def matmul(x: Tensor, other: Tensor, *, axes: Axes, sizes: Mapping[str, int]) -> Tensor:
    """Compute `aten.matmul.default` with a matrix, in tiles of the matrix.

    Moves as much as `linear`.
    """
    return _InTiles.apply(x, other.mT, _way(other.mT, axes))


mm = matmul


@dataclass(frozen=True, slots=True)
class _Way:
    """The axis over which tiles travel, the dim of the weight [O, K] that it splits, and a rank's slices along it."""

    axis: Axis
    dim: int
    pieces: tuple[int, ...]

    def parts_of(self, rows: Tensor) -> Sequence[Tensor]:
        """Return views [..., n, C] of rows whose last dim goes with the split one, tile by tile."""
        return rows.unflatten(-1, (self.axis.size, -1)).split(self.pieces, -1)


def _way(w_OK: Tensor, axes: Axes) -> _Way:
    rows = {name for factor, names in axes.items() if factor not in (COLUMN, ROW) for name in names}
    shared = {dim: [name for name in axes.get(factor, ()) if name in rows] for dim, factor in enumerate((COLUMN, ROW))}
    dim = 0 if shared[0] else 1
    (axis,) = axes_of(shared[dim])
    return _Way(axis, dim, tile_sizes(w_OK.shape[dim], w_OK.numel() * w_OK.itemsize * axis.size))


def _tiles(part: Tensor, way: _Way) -> Iterator[Tensor]:
    """Yield each tile [O, K] of all ranks, its split dim by rank (n·C), while the next one is in flight."""
    pieces = part.split(way.pieces, way.dim)
    coming = start_gather(pieces[0], way.axis)
    for number in range(len(pieces)):
        here = arrived(coming)  # [n, O, K]
        if number + 1 < len(pieces):
            coming = start_gather(pieces[number + 1], way.axis)
        yield here.flatten(0, 1) if way.dim == 0 else here.movedim(0, 1).flatten(1)


def _placed(x: Tensor, tiles: Iterable[Tensor], way: _Way, size: int) -> Tensor:
    """Multiply x [..., K] by tiles [n·C, K] of a matrix with so many rows; return [..., O]."""
    out = x.new_empty(*x.shape[:-1], size)
    for columns, tile in zip(way.parts_of(out), tiles, strict=True):
        columns.copy_((x @ tile.mT).view(columns.shape))
    return out


def _summed(x: Tensor, tiles: Iterable[Tensor], way: _Way) -> Tensor:
    """Multiply x [..., K] by tiles [O, n·C] of a matrix; return [..., O]."""
    total: Tensor | None = None
    for features, tile in zip(way.parts_of(x), tiles, strict=True):
        rows = features.flatten(-2)
        if total is None:
            total = rows @ tile.mT
        else:
            _flat(total).addmm_(_flat(rows), tile.mT)
    assert total is not None
    return total


def _weight_gradient(grad: Tensor, x: Tensor, like: Tensor, way: _Way) -> Tensor:
    """Return this rank's part of the sum over ranks of [O, K], from rows [..., O] and [..., K]."""
    found = torch.empty_like(like)
    waiting: tuple[Tensor, Tensor] | None = None
    for piece, part in zip(found.split(way.pieces, way.dim), way.parts_of(x if way.dim else grad), strict=True):
        some = _flat(part.flatten(-2))
        tile = _flat(grad).mT @ some if way.dim else some.mT @ _flat(x)
        by_rank = tile.unflatten(way.dim, (way.axis.size, -1)).movedim(way.dim, 0)
        travelling = start_reduce_scatter(by_rank, way.axis)
        if waiting is not None:
            waiting[0].copy_(arrived(waiting[1]).squeeze(0))
        waiting = piece, travelling
    assert waiting is not None
    waiting[0].copy_(arrived(waiting[1]).squeeze(0))
    return found


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1])


class _InTiles(autograd.Function):
    """x [..., K] of this rank, its part of the weight [O, K] → [..., O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, way: _Way) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, part)
        ctx.way = way
        tiles = _tiles(part, way)
        return _summed(x, tiles, way) if way.dim else _placed(x, tiles, way, part.shape[0] * way.axis.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, part), way = ctx.saved_tensors, ctx.way
        of_x, of_weight = (ctx.needs_input_grad[at] and is_requested(ctx, at) for at in range(2))
        of_rows = None
        if of_x:
            tiles = (tile.mT for tile in _tiles(part, way))
            of_rows = _placed(grad, tiles, way, part.shape[1] * way.axis.size) if way.dim else _summed(grad, tiles, way)
        return of_rows, _weight_gradient(grad, x, part, way) if of_weight else None, None
