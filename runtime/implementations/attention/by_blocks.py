"""Attention whose sequences are split: each rank computes the blocks of scores that its queries need.

An axis may split

    the queries         keys and values are whole on it, gathered before; keys behind the queries are not computed
    both, together      keys and values travel around a ring while the ranks compute with what they have; their
                        gradients travel with them, and are home after n - 1 steps ("ring attention", Liu et al. 2023)
    the keys            each rank has a part of every result, which are merged by their log-sum-exp
    query heads         keys and values have all heads, of which each rank takes those that its queries share (`heads`)

and axes may do different things, as in Ulysses inside of a ring ("USP", Fang and Zhao 2024) or 2D attention
("LoongTrain", Gu et al. 2024). No tensor has a dim of queries and one of keys, but a mask that is given. A dropout
drops the same on all layouts (`autopar.ir.program.operators.attention.dropout`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.kernels import Block
from autopar.ir.program.operators.attention.sums import Gradients, Sum
from autopar.runtime.collectives.mesh_axes import IN_ORDER, Axes, axes_of, num_parts_of
from autopar.runtime.implementations.attention.blocks import Pair, Piece, add_blocks, add_gradients, pairs_of
from autopar.runtime.implementations.attention.drawing import drawn, dropout_of
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.positions import KEYS, QUERIES, Split
from autopar.runtime.implementations.attention.steps import in_steps
from autopar.runtime.implementations.each_rank import Ranks

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    /,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: int | None = None,
) -> Tensor:
    """Compute `aten.scaled_dot_product_attention.default` for this rank's queries and keys.

    A mask has this rank's queries, and is split as the keys are by axes that split keys alone. With dropout, `key`
    identifies the call.

    Moves, over n ranks that split both: n - 1 times keys and values forward; n - 1 times keys, values and their
    gradients (in float32) backward. Over ranks that split keys alone: the result and two numbers per query forward.
    """
    keys, value = shared_heads(query, keys, value, axes, sizes)
    if dropout_p == 0 and not (axes.get(QUERIES) or axes.get(KEYS)):
        return _ATTENTION(query, keys, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    q, k, v, mask = four_dims(query, keys, value, attn_mask)
    split = _ByPositions(
        Split.of(axes, zigzag, sizes[KEYS]),
        is_causal,
        scale if scale is not None else 1 / math.sqrt(query.shape[-1]),
        # Padded blocks have more queries than the whole tensor.
        q.shape[-2] * num_parts_of(axes_of(axes.get(QUERIES, ()))),
        dropout_p,
    )
    dropping = None
    if dropout_p > 0:
        assert key is not None, "the rule gives calls with dropout a key"
        dropping = drawn(query, sizes[KEYS], dropout_p, key, axes, sizes, zigzag)
    out = in_steps(q, k, v, split, (mask, dropping))
    return out.view(*query.shape[:-1], value.shape[-1])


def four_dims(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return queries, keys, values and a mask with one leading dim, and a dim of heads."""
    if q.ndim == 4:
        return q, k.expand(q.shape[0], *k.shape[1:]), v.expand(q.shape[0], *v.shape[1:]), mask
    leading = q.shape[:-3]
    heads = q.shape[-3:-2] if q.ndim > 2 else (1,)

    def widened(x: Tensor) -> Tensor:
        own = x.shape[-3:-2] if q.ndim > 2 else (1,)
        return x.expand(*leading, *own, *x.shape[-2:]).reshape(-1, *own, *x.shape[-2:])

    if mask is not None:
        mask = mask.expand(*leading, *(heads if q.ndim > 2 else ()), *mask.shape[-2:])
        mask = mask.reshape(-1, *heads, *mask.shape[-2:])
    return widened(q), widened(k), widened(v), mask


@dataclass(frozen=True, slots=True)
class _ByPositions:
    """A call whose blocks follow from the positions that ranks have."""

    split: Split
    causal: bool
    scale: float
    num_queries: int
    dropout_p: float = 0.0

    def attend(self, ranks: Ranks, step: int, total: Sum, q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> None:
        add_blocks(total, self._pairs(ranks, step), q, k, v, self._block(ranks, step, q.device, *masks))

    def gradients(self, ranks: Ranks, step: int, sums: Gradients, given: tuple[Tensor, ...], *masks: Any) -> None:
        block = self._block(ranks, step, given[0].device, *masks)
        add_gradients(sums, self._pairs(ranks, step), *given, block=block)

    def _pairs(self, ranks: Ranks, step: int) -> tuple[Pair, ...]:
        """Return the blocks that a rank computes with the keys that it has after so many steps around the ring."""
        keys = self.split.keys_at(ranks, step)
        return pairs_of(self._queries(ranks), keys, self.split.keys_unmoved(ranks), self.causal)

    def _queries(self, ranks: Ranks) -> tuple[Piece, ...]:
        return self.split.queries.pieces(self.num_queries, ranks[: len(self.split.queries.axes)])

    def _block(self, ranks: Ranks, step: int, device: torch.device, mask: Tensor | None, drawn: Tensor | None) -> Block:
        """Return the block that a rank computes with these keys."""
        if drawn is None:
            return Block(self.scale, mask_BHST=mask)
        keys = self.split.keys_at(ranks, step)
        dropout = dropout_of(self.dropout_p, drawn, self._queries(ranks), keys, device)
        return Block(self.scale, mask_BHST=mask, dropout=dropout)
