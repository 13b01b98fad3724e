"""Products by a weight that is never whole on a device: gathered and used a tile at a time, forward and backward.

    o + rows    ranks that have other rows of the input hold columns of the weight: a tile has some of each rank's
    k + rows    they hold rows of the weight: a tile has some of each rank's, by which features are multiplied

as ZeRO-Infinity's memory-centric tiling (Rajbhandari et al., 2021), in the layouts of weights that ZeRO-3 stores. A
tile is gathered while the one before it is used, and again in the backward; then tiles of the gradient are reduced one
after the other, so that no more than two tiles are whole at a time. Offered on request. Each product is
gathered by itself, in as many messages as there are tiles, whatever its layer gathers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from autopar.ir.sharding.layout import R, S
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import TOGETHER, Choice
from autopar.strategies.rules.products.chunked import COLUMN, ROW, leading_factors

aten = torch.ops.aten

NAME = "tiled_weight"
TILE_BYTES = 2**26  # assumed: gathers of so many bytes reach the bandwidth of links
LEAST_TILES, MOST_TILES = 2, 16


def num_tiles(num_bytes: int) -> int:
    """Return the number of tiles in which a weight of so many bytes is used."""
    return max(LEAST_TILES, min(MOST_TILES, -(-int(num_bytes) // TILE_BYTES)))


def tile_sizes(size: int, num_bytes: int) -> tuple[int, ...]:
    """The sizes of tiles along a dim of a rank's part, as equal as they can be; none is empty."""
    count = min(num_tiles(num_bytes), size)
    ends = [size * number // count for number in range(count + 1)]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def in_tiles(call: Call) -> tuple[Implementation, ...]:
    """The implementation of a product of rows by a matrix; none where the input is a vector."""
    x, weight = call.inputs[:2]
    if len(x.shape) < 2 or len(weight.shape) != 2:
        return ()
    transposed = call.target is aten.linear.default
    column, row = (S(0), S(1)) if transposed else (S(1), S(0))
    of_bias = (R,) if len(call.inputs) > 2 else ()
    choices = [
        Choice(f"{factor}{TOGETHER}{rows}", (S(dim), placement, *of_bias), (S(dim),))
        for dim, rows in enumerate(leading_factors(call))
        for factor, placement in ((COLUMN, column), (ROW, row))
    ]
    return (TiledWeight(f"products.tiled:{call.name}", choices=tuple(choices)),)


@dataclass(frozen=True, slots=True)
class TiledWeight(Implementation):
    """A product by tiles of its weight."""

    factors: frozenset[str] | None = frozenset()
    name: str = NAME
    on_demand: bool = True
    stands_for_last: bool = True

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return gathers of the weight, again for the input's gradient, and reductions of its own gradient."""
        rows = _rows(call, sizes)
        if rows is None:
            return ()
        whole, over = _whole_bytes(call, sizes), TOGETHER + rows
        ends = [whole * number // num_tiles(whole) for number in range(num_tiles(whole) + 1)]
        tiles = [end - start for start, end in itertools.pairwise(ends)]
        found = [Collective("all_gather", over, each) for each in tiles]
        if call.inputs[0].requires_grad:
            found += [Collective("all_gather", over, each, True) for each in tiles]
        if call.inputs[1].requires_grad:
            found += [Collective("reduce_scatter", over, each, True) for each in tiles]
        return tuple(found)

    def hidden_share(self, call: Call, sizes: LocalSizes) -> float:
        """Return the share of all but the first tile's gather, or the last one's reduction."""
        return 1 - 1 / num_tiles(_whole_bytes(call, sizes))

    def launches(self, call: Call, sizes: LocalSizes) -> int:
        """Count the tiles, each of which has a product."""
        return num_tiles(_whole_bytes(call, sizes))

    def moved_bytes(self, op: OpRule, call: Call, sizes: LocalSizes, inputs: int, outputs: int) -> int:
        """Return the bytes read and written, with the tiles as they arrive; every tile reads the input."""
        whole = _whole_bytes(call, sizes)
        read = math.prod(sizes[name] for name in (*leading_factors(call), ROW)) * call.inputs[0].dtype.itemsize
        return op.moved_bytes(inputs, outputs) + whole + read * (num_tiles(whole) - 1)

    def backward_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of a tile that is used and one in transit; or of a gradient that is made and one sent."""
        whole = _whole_bytes(call, sizes)
        return 0 if _rows(call, sizes) is None else 2 * -(-whole // num_tiles(whole))


def _rows(call: Call, sizes: LocalSizes) -> str | None:
    """The factor of rows with which the weight is split; None where it is not."""
    return next((rows for rows in leading_factors(call) if TOGETHER + rows in sizes), None)


def _whole_bytes(call: Call, sizes: LocalSizes) -> int:
    """Bytes of the weight as it would be gathered over the axis."""
    rows = _rows(call, sizes)
    parts = 1 if rows is None else sizes[TOGETHER + rows]
    return sizes[COLUMN] * sizes[ROW] * parts * call.inputs[1].dtype.itemsize
