"""Blocks of attention with dropout: scores are written out, but those of one tile at a time, forward and backward.

No fused kernel drops what several devices agree on, so that a block runs as many small ones, behind an operator of its
own: what compiles a graph sees one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.dropout import Dropout, Range
from autopar.ir.program.operators.attention.kernels import Block
from autopar.ir.program.operators.attention.sums import Gradients, Sum

SCORES, SCORES_ON_GPU = 2**20, 2**24
"""About as many are in a tile, of all samples and heads: 4 MB of a CPU's caches, and enough for a GPU's launches."""
SMALLEST = 64
"""Queries, and keys, of a tile at least."""


def tiles(queries: Range, keys: Range, block: Block, q: Tensor) -> Iterator[tuple[Range, Range, Block]]:
    """Yield the tiles of a block of queries [B, H, S, D], or the block itself if a kernel computes it."""
    if block.dropout is None and block.modified is None:
        yield queries, keys, block
        return
    scores = SCORES_ON_GPU if q.is_cuda else SCORES
    size = max(SMALLEST, math.isqrt(scores // max(1, q.shape[0] * q.shape[1])))
    num_queries, num_keys = (end - first for first, end in (queries, keys))
    for i in range(0, num_queries, size):
        for j in range(0, min(num_keys, i + 1) if block.causal else num_keys, size):
            rows, columns = (i, min(i + size, num_queries)), (j, min(j + size, num_keys))
            tile = block.part(rows, columns, causal=block.causal and i == j)
            yield _moved(rows, queries[0]), _moved(columns, keys[0]), tile


def _moved(places: Range, by: int) -> Range:
    return places[0] + by, places[1] + by


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Compute `kernels.attend` of a block with dropout in tiles; both results are in float32 at least."""
    return torch.ops.autopar.attend_in_tiles(q, k, v, *_specified(block))


def gradients_in_tiles(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `kernels.attend_backward` of a block with dropout in tiles, in float32 at least."""
    return torch.ops.autopar.attend_in_tiles_backward(grad, q, k, v, out, lse, *_specified(block))


Specified = tuple[Tensor | None, Tensor, Tensor, float, float, bool]


def _specified(block: Block) -> Specified:
    dropout = block.dropout
    assert dropout is not None, "a block without dropout has kernels"
    return block.mask_BHST, dropout.rows_BHS, dropout.columns_T, dropout.p, block.scale, block.causal


def _tiles_of(q: Tensor, k: Tensor, specified: Specified) -> Iterator[tuple[Range, Range, Block]]:
    mask, rows, columns, p, scale, causal = specified
    block = Block(scale, causal, mask, Dropout(p, rows, columns))
    return tiles((0, q.shape[-2]), (0, k.shape[-2]), block, q)


def _attend(q: Tensor, k: Tensor, v: Tensor, *specified: *Specified) -> tuple[Tensor, Tensor]:
    total = Sum.empty(q, v)
    for queries, keys, tile in _tiles_of(q, k, specified):
        total.add(queries, keys, q, k, v, tile)
    return total.out_BHSD, total.lse_BHS


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *specified: *Specified
) -> tuple[Tensor, Tensor, Tensor]:
    sums = Gradients.empty(q, k, v)
    for queries, keys, tile in _tiles_of(q, k, specified):
        sums.add(queries, keys, grad, q, k, v, out, lse, tile)
    return sums.q_BHSD, sums.k_BGTD, sums.v_BGTD


def _fake_attend(q: Tensor, k: Tensor, v: Tensor, *specified: *Specified) -> tuple[Tensor, Tensor]:
    total = Sum.empty(q, v)
    return total.out_BHSD, total.lse_BHS


def _fake_attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *specified: *Specified
) -> tuple[Tensor, Tensor, Tensor]:
    sums = Gradients.empty(q, k, v)
    return sums.q_BHSD, sums.k_BGTD, sums.v_BGTD


_BLOCK = "Tensor? mask, Tensor rows, Tensor columns, float p, float scale, bool causal"
for _schema in (
    f"attend_in_tiles(Tensor q, Tensor k, Tensor v, {_BLOCK}) -> (Tensor, Tensor)",
    f"attend_in_tiles_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_BLOCK})"
    " -> (Tensor, Tensor, Tensor)",
):
    torch.library.define(f"autopar::{_schema.partition('(')[0]}", _schema[_schema.index("(") :])
torch.library.impl("autopar::attend_in_tiles", "default", _attend)
torch.library.impl("autopar::attend_in_tiles_backward", "default", _attend_backward)
torch.library.register_fake("autopar::attend_in_tiles", _fake_attend)
torch.library.register_fake("autopar::attend_in_tiles_backward", _fake_attend_backward)
