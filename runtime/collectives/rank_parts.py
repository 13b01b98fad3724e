"""Parts of a dim by rank: what a collective moves, one rank's part after the other, and the whole that they make.

Legend: n ranks, `parts` is [n, *part].

In order, rank r has block r of n. If zigzag-sharded, a dim is cut into 2n chunks, and rank r has chunks r and 2n-1-r:
of a causal attention each rank computes the same (zhuzilin's ring-flash-attention, 2024; Llama 3's context
parallelism). An axis zigzag-shards the part of a dim that the axes outside of it have left; two axes shard it as one of
both their sizes would.

Both functions give views where `ir.sharding.rearranged` says that nothing is rearranged, and else copy once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_rank(x: Tensor, dim: int, num_ranks: int, zigzag: bool = False) -> Tensor:
    """Return the parts of a whole that divides, [n, *part]: a view of it unless it is zigzag-sharded."""
    if not zigzag:
        return x.unflatten(dim, (num_ranks, x.shape[dim] // num_ranks)).movedim(dim, 0)
    pieces = x.unflatten(dim, (2 * num_ranks, x.shape[dim] // (2 * num_ranks)))
    pairs = [pieces[(slice(None),) * dim + (_pair(rank, num_ranks),)] for rank in range(num_ranks)]
    return torch.stack(pairs).flatten(dim + 1, dim + 2)


def whole_of(parts: Tensor, dim: int, zigzag: bool = False) -> Tensor:
    """Return the whole that the parts of all ranks make, [n, *part], in row-major order."""
    if not zigzag:
        return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()  # parts of size 1 flatten to a view
    halves = parts.unflatten(dim + 1, (2, parts.shape[dim + 1] // 2))
    early, late = halves.unbind(dim + 1)
    return torch.cat([*early.unbind(), *reversed(late.unbind())], dim)


def _pair(rank: int, num_ranks: int) -> slice:
    last = 2 * num_ranks - 1 - rank
    return slice(rank, last + 1, last - rank)
