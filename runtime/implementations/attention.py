"""Causal attention of which each rank holds some of the queries."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.collectives.axes import Axes, axes_of, part_of

QUERIES = "s"
"""The factor of the queries' positions."""


def causal_attention(
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
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `aten.scaled_dot_product_attention.default` with is_causal, for the queries that this rank holds.

    Query i of n on part p is the query p·n + i of the whole, and sees the keys up to that one. Every rank holds all
    keys and values. Moves nothing.
    """
    assert is_causal and attn_mask is None and dropout_p == 0, "the rule uses this for causal calls without dropout"
    mask = seen_keys(query.shape[-2], keys.shape[-2], axes, query.device)
    return F.scaled_dot_product_attention(query, keys, value, mask, scale=scale, enable_gqa=enable_gqa)


def seen_keys(num_queries: int, num_keys: int, axes: Axes, device: torch.device) -> Tensor:
    """Which of all keys each of this rank's queries sees, where none sees what comes behind it: [queries, keys]."""
    first = part_of(axes_of(axes.get(QUERIES, ()))) * num_queries
    positions = torch.arange(num_queries, device=device) + first
    return torch.arange(num_keys, device=device) <= positions.unsqueeze(-1)
