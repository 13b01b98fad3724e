"""Blocks of scores that a mask leaves, found from its vectors alone; hidden blocks are not computed.

A vector is broadcast to [batch, heads, queries, keys] and has no dim of queries, or none of keys: it is as small as a
row of scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.dropout import Range
from autopar.ir.program.operators.attention.expressions import Bounds, Expression, UnboundedError, bounds

LARGEST = 1024
"""Queries, and keys, of a block: its mask has 2 or 4 MB for a sample."""
SMALLEST = 128
"""Minimum size of a block; fewer than twice as many queries, or keys, form one block."""

Row = tuple[Range, tuple[tuple[Range, bool], ...]]
"""Queries, and the blocks of keys that they may see, each with whether the mask leaves all of it as it is."""


def block_size(number: int) -> int:
    """Return the size of all blocks but the last: there is an even number of them, as of the chunks of a zigzag.

    >>> block_size(200), block_size(1024), block_size(5000)
    (200, 512, 834)
    """
    if number < 2 * SMALLEST:
        return number
    return math.ceil(number / (2 * math.ceil(number / (2 * LARGEST))))


def rows_of(expression: Expression, vectors: Sequence[Tensor], num_queries: int, num_keys: int) -> tuple[Row, ...]:
    """Return the blocks that are computed; those which all are seen and lie side by side are one."""
    sizes = block_size(num_queries), block_size(num_keys)
    queries, keys = places(num_queries, sizes[0]), places(num_keys, sizes[1])
    if len(queries) == len(keys) == 1:
        return ((queries[0], ((keys[0], False),)),)
    known = known_of(expression, [bounds_of(x, *sizes) for x in vectors], len(queries), len(keys))
    hidden, seen = torch.stack(known).tolist()
    rows = ([(each, seen[i][j]) for j, each in enumerate(keys) if not hidden[i][j]] for i in range(len(queries)))
    return tuple((each, tuple(_joined(blocks))) for each, blocks in zip(queries, rows, strict=True))


def known_of(
    expression: Expression, vectors: Sequence[Bounds], num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Return the blocks that are certainly hidden, and those that are certainly seen as a whole.

    Both are truth values [blocks of queries, blocks of keys].
    """
    shape = num_queries, num_keys
    try:
        low, high = bounds(expression, vectors)
    except UnboundedError:
        nothing = torch.zeros(shape, dtype=torch.bool)
        return nothing, nothing
    truths = low.dtype is torch.bool
    hidden, seen = (~high, low) if truths else (high == -math.inf, (low == 0) & (high == 0))

    def of_all(x: Tensor) -> Tensor:
        return x.expand(*x.shape[:-2], *shape).reshape(-1, *shape).all(0)

    return of_all(hidden), of_all(seen)


def bounds_of(vector: Tensor, queries: int, keys: int) -> Bounds:
    """Return the lowest and highest value in each block of so many queries and keys."""
    vector = vector.reshape((1,) * (2 - vector.ndim) + tuple(vector.shape))
    dim, size = (-2, queries) if vector.shape[-2] > 1 else (-1, keys)
    number = vector.shape[dim]
    if number > 1:
        # The last element fills up the last block.
        places = torch.arange(-(-number // size) * size, device=vector.device).clamp_(max=number - 1)
        blocks = vector.index_select(dim, places).unflatten(dim, (-1, size))
        low, high = blocks.amin(dim), blocks.amax(dim)
    else:
        low = high = vector
    return without_nan(low, high)


def without_nan(low: Tensor, high: Tensor) -> Bounds:
    """Widen bounds that are nan to minus and plus infinity, as nan may stand for any value."""
    if not low.is_floating_point():
        return low, high
    return low.nan_to_num(-math.inf, math.inf, -math.inf), high.nan_to_num(math.inf, math.inf, -math.inf)


def places(number: int, size: int) -> list[Range]:
    """Return the blocks of so many queries or keys."""
    return [(first, min(first + size, number)) for first in range(0, number, size)]


def _joined(blocks: Sequence[tuple[Range, bool]]) -> Iterator[tuple[Range, bool]]:
    """Yield consecutive blocks without a mask as one."""
    first: Range | None = None
    for keys, seen in blocks:
        if first is not None and seen and first[1] == keys[0]:
            first = first[0], keys[1]
            continue
        if first is not None:
            yield first, True
        first = keys if seen else None
        if not seen:
            yield keys, False
    if first is not None:
        yield first, True
