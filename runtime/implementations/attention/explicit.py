"""Attention by explicit probabilities [..., heads, queries, keys], for what no blocks give.

That is dropout under a mask of numbers: blocks of such a mask cannot be merged where a row sees nothing (`by_blocks`), or
the mask has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from autopar.runtime.collectives.axes import Axes, axes_of, num_parts_of
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.places import Dealing, Ranks, on_each_rank
from autopar.runtime.implementations.dropout import dropout


def attention_with_dropout(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    /,
    *,
    key: int,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Collection[str] = (),
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `aten.scaled_dot_product_attention.default`, by explicit probabilities [..., heads, queries, keys].

    Factors: "h" heads (outermost where query heads share keys: "(h r)"), "q" query heads alone, "s" queries, the
    others are the leading dims in order. Half precision is computed in float32, as PyTorch's own explicit path does.
    Moves nothing.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, value = shared_heads(query, keys, value, axes, sizes)
    if enable_gqa:
        keys, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (keys, value))
    # Both sides take half of the scale, so that their product cannot overflow.
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query.to(wide) * root) @ (keys.to(wide) * root).transpose(-2, -1)
    if is_causal:
        queries = Dealing(axes_of(axes.get("s", ())), "s" in zigzag)
        scores = scores.masked_fill(~_seen_keys(*scores.shape[-2:], queries, scores.device), -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    # Safe: a query that may look at no key gets zeros.
    probabilities = torch.ops.aten._safe_softmax.default(scores, -1)
    leading = [factor for factor in sizes if factor not in ("h", "r", "q", "s")]
    whole = {factor: sizes[factor] for factor in leading[: query.ndim - 3]}
    if query.ndim > 2:
        whole["h"] = sizes["h"] * sizes.get("r", 1)
    whole |= {"s": sizes["s"], "keys": keys.shape[-2]}
    split = {**axes, "h": (*axes.get("h", ()), *axes.get("q", ()))}
    probabilities = dropout(probabilities, dropout_p, True, key=key, axes=split, sizes=whole, zigzag=zigzag)
    return (probabilities @ value.to(wide)).to(query.dtype)


def _seen_keys(num_queries: int, num_keys: int, queries: Dealing, device: torch.device) -> Tensor:
    """Which of all keys each of this rank's queries sees, where none sees what comes behind it: [queries, keys]."""
    size = num_queries * num_parts_of(queries.axes)

    def compute(ranks: Ranks) -> list[Tensor]:
        pieces = queries.pieces(size, ranks)
        positions = torch.cat([torch.arange(piece.first, piece.end, device=device) for piece in pieces])
        return [torch.arange(num_keys, device=device) <= positions.unsqueeze(-1)]

    (seen,) = on_each_rank(compute, queries.axes, ())
    return seen
