"""Heads of keys and values that a rank's query heads share, if an axis splits query heads alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.collectives.mesh_axes import Axes, axes_of, part_of

QUERY_HEADS, GROUP = "q", "r"
"""The factor of query heads alone, and of those that share a head of keys."""


def attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    /,
    *args: Any,
    op: Callable[..., Tensor],
    axes: Axes,
    sizes: Mapping[str, int],
    **kwargs: Any,
) -> Tensor:
    """Compute the attention `op` for this rank's query heads and all keys.

    Moves nothing.
    """
    return op(query, *shared_heads(query, keys, value, axes, sizes), *args, **kwargs)


def shared_heads(
    query: Tensor, keys: Tensor, value: Tensor, axes: Axes, sizes: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Return the heads of keys and values [..., heads, positions, features] that this rank's query heads share.

    Where a rank has parts of groups of different sizes, a head is there several times, so that all serve as many.
    """
    split = axes_of(axes.get(QUERY_HEADS, ()))
    if not split:
        return keys, value
    heads, group = query.shape[-3], sizes[GROUP]
    served = torch.arange(0, heads, math.gcd(heads, group), device=query.device) + part_of(split) * heads
    return keys.index_select(-3, served // group), value.index_select(-3, served // group)
