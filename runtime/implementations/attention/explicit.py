"""Attention by explicit probabilities [..., heads, queries, keys], for what no blocks give.

That is dropout under a mask of numbers, which may have a gradient, or hide keys without being -inf: a row that sees
none is then a mean over all keys, which blocks do not give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.runtime.collectives.mesh_axes import IN_ORDER, Axes
from autopar.runtime.implementations.attention.drawing import lines
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.positions import KEYS, QUERIES
from autopar.runtime.implementations.dropout import dropout


def attention_with_dropout(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float,
    is_causal: bool = False,
    /,
    *,
    key: int,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `aten.scaled_dot_product_attention.default` by explicit probabilities [..., heads, queries, keys].

    Factors: "h" heads (outermost where query heads share keys: "(h r)"), "q" query heads alone, "s" queries, the others
    are the leading dims in order. Half precision is computed in float32, as PyTorch's own explicit path does. Moves
    nothing.
    """
    assert not is_causal, "PyTorch takes no mask of a causal call"
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, value = shared_heads(query, keys, value, axes, sizes)
    if enable_gqa:
        keys, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (keys, value))
    # Both sides take half of the scale, so that their product cannot overflow.
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query.to(wide) * root) @ (keys.to(wide) * root).transpose(-2, -1)
    scores = scores + attn_mask
    # Safe: a query that may look at no key gets zeros.
    probabilities = torch.ops.aten._safe_softmax.default(scores, -1)
    whole, split = lines(query, axes, sizes)
    whole |= {QUERIES: sizes[QUERIES], KEYS: keys.shape[-2]}
    probabilities = dropout(probabilities, dropout_p, True, key=key, axes=split, sizes=whole, zigzag=zigzag)
    return (probabilities @ value.to(wide)).to(query.dtype)
