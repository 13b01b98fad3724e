"""Dropout in a rank's part of attention, given the place of its samples, heads and positions in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.dropout import Dropout, lines_of
from autopar.runtime.collectives.mesh_axes import Axes, axes_of, num_parts_of
from autopar.runtime.implementations.attention.blocks import Piece
from autopar.runtime.implementations.attention.heads import GROUP, QUERY_HEADS
from autopar.runtime.implementations.attention.positions import KEYS, QUERIES, FactorSplit, positions
from autopar.runtime.implementations.dropout import kept_of_whole, seed_on_device
from autopar.runtime.implementations.each_rank import Ranks, on_each_rank
from autopar.runtime.implementations.randomness import randomness

HEADS = "h"


def lines(query: Tensor, axes: Axes, sizes: Mapping[str, int]) -> tuple[dict[str, int], Axes]:
    """Return the sizes of the dims of `query` before that of positions, in the whole, and the axes that split them, by
    factor.

    Leading dims in order, then heads, where there are any.
    """
    leading = [factor for factor in sizes if factor not in (HEADS, GROUP, QUERY_HEADS, QUERIES, KEYS)]
    whole = {factor: sizes[factor] for factor in leading[: query.ndim - 3]}
    if query.ndim > 2:
        whole[HEADS] = sizes[HEADS] * sizes.get(GROUP, 1)
    return whole, {**axes, HEADS: (*axes.get(HEADS, ()), *axes.get(QUERY_HEADS, ()))}


def drawn(
    query: Tensor,
    num_keys: int,
    p: float,
    key: int,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes,
) -> Tensor:
    """Return numbers that identify the samples and heads of this rank in draws, [B, H].

    In the deterministic mode, return which scores this rank's queries keep instead, [B, H, queries, all keys]. `query`
    is [..., heads, queries, features].
    """
    whole, split = lines(query, axes, sizes)
    if randomness().deterministic:
        whole |= {QUERIES: sizes[QUERIES], KEYS: num_keys}
        # Draw the masks of all keys; blocks take theirs.
        over = [axes_of(split.get(factor, ()) if factor != KEYS else ()) for factor in whole]
        wide = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
        kept = kept_of_whole(wide, [*whole.values()], p, over, [zigzag.get(factor, ()) for factor in whole])
        return kept.reshape(-1, *(kept.shape[-3:] if query.ndim > 2 else (1, *kept.shape[-2:])))
    splits = [FactorSplit.of(factor, split, zigzag) for factor in whole]
    local = query.shape[: len(whole)]
    every = [axis for each in splits for axis in each.axes]

    def compute(ranks: Ranks, seed: Tensor) -> list[Tensor]:
        number = torch.zeros((), dtype=torch.int64, device=query.device)
        stands = iter(ranks)
        found = []
        for each, size in zip(splits, local, strict=True):
            stand = tuple(next(stands) for _ in each.axes)
            found.append(positions(each.pieces(size * num_parts_of(each.axes), stand), query.device))
        heads = found.pop() if query.ndim > 2 else number.view(1)
        for place, size in zip(found, whole.values(), strict=False):
            number = (number * size).unsqueeze(-1) + place
        return [lines_of(seed, number.reshape(-1), heads)]

    (result,) = on_each_rank(compute, every, (seed_on_device(key, query.device),))
    return result


def dropout_of(
    p: float, drawn: Tensor, queries: Sequence[Piece], keys: Sequence[Piece], device: torch.device
) -> Dropout:
    """Return the dropout of some queries and keys, given what is `drawn` for this rank."""
    return Dropout.of(p, drawn, positions(queries, device), positions(keys, device))
