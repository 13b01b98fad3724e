"""Operators of `embedding_bag` that return the pooled rows only, without the counts that ATen also returns.

Bags of one size are rows of indices (bags, size), so that they can be divided among devices. Bags of any size have flat
indices and the place where each bag begins, as ATen has them, which says nothing of a part of the bags.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MODES = ("sum", "mean", "max")
"""The names of the numbers that ATen has for the argument `mode`."""


def _bags(weight: Tensor, indices: Tensor, per_sample_weights: Tensor | None, mode: int, padding_idx: int) -> Tensor:
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding_bag(
        indices, weight, mode=MODES[mode], per_sample_weights=per_sample_weights, padding_idx=padding
    )


def _ragged_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
) -> Tensor:
    return F.embedding_bag(
        indices,
        weight,
        offsets,
        mode=MODES[mode],
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=None if padding_idx < 0 else padding_idx,
    )


torch.library.define(
    "autopar::embedding_bags",
    "(Tensor weight, Tensor indices, Tensor? per_sample_weights, int mode, int padding_idx) -> Tensor",
)
torch.library.define(
    "autopar::ragged_embedding_bags",
    "(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int mode, bool include_last_offset,"
    " int padding_idx) -> Tensor",
)
# Composites: their derivatives are those of what they call.
torch.library.impl("autopar::embedding_bags", "CompositeImplicitAutograd", _bags)
torch.library.impl("autopar::ragged_embedding_bags", "CompositeImplicitAutograd", _ragged_bags)

EMBEDDING_BAGS: torch._ops.OpOverload = torch.ops.autopar.embedding_bags.default
"""weight (rows, features), indices (bags, size), weights of the same shape → (bags, features); -1: no padding."""
RAGGED_EMBEDDING_BAGS: torch._ops.OpOverload = torch.ops.autopar.ragged_embedding_bags.default
"""weight (rows, features), flat indices, offsets (bags), flat weights → (bags, features); -1: no padding."""
