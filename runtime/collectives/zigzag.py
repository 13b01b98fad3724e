"""Zigzag: how positions are dealt to ranks where later ones do more work, as under a causal mask.

A dim is cut into 2n pieces, and rank r of n has pieces r and 2n-1-r: of a causal attention each rank computes the same
(zhuzilin's ring-flash-attention, 2024; Llama 3's context parallelism). An axis that deals a dim deals the part that the
axes outside of it have left, and what two axes deal is what one of both their sizes would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def parts_of(x: Tensor, dim: int, num_ranks: int, zigzag: bool) -> Sequence[Tensor]:
    """The part of each rank, of a whole that divides."""
    if not zigzag:
        return x.chunk(num_ranks, dim)
    pieces = x.chunk(2 * num_ranks, dim)
    return [torch.cat([pieces[first], pieces[last]], dim) for first, last in _pairs(num_ranks)]


def whole_of(parts: Sequence[Tensor], dim: int, zigzag: bool) -> Tensor:
    """The whole that the parts of all ranks make."""
    if not zigzag:
        return torch.cat(list(parts), dim)
    pieces: dict[int, Tensor] = {}
    for part, places in zip(parts, _pairs(len(parts)), strict=True):
        pieces.update(zip(places, part.chunk(2, dim), strict=True))
    return torch.cat([pieces[place] for place in range(len(pieces))], dim)


def _pairs(num_ranks: int) -> list[tuple[int, int]]:
    """The two pieces of every rank."""
    return [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
