"""A table of which each rank holds some rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.program.operators.embedding_bags import MODES
from autopar.runtime.collectives.mesh_axes import Axes, axes_of, part_of

ROWS = "k"
"""The factor of the table's rows."""


def vocabulary_parallel_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `aten.embedding.default` with split rows of `weight`; the result is partial.

    Rows of other ranks count as zero. Every rank sees all `indices`. The last rows may be padding, which no index
    reaches. Moves nothing.
    """
    assert not scale_grad_by_freq and not sparse, "no rule splits the rows of such an embedding"
    num_rows = weight.shape[0]
    local = indices - part_of(axes_of(axes.get(ROWS, ()))) * num_rows
    row = local.clamp(0, num_rows - 1)
    found = F.embedding(row, weight).masked_fill_((local != row).unsqueeze(-1), 0)
    # The row of the padding index has a value but gets no gradient.
    return torch.where((indices == padding_idx).unsqueeze(-1), found.detach(), found) if padding_idx >= 0 else found


def vocabulary_parallel_bags(
    weight: Tensor,
    indices: Tensor,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `autopar.embedding_bags`, sums or means, with split rows of `weight`; the result is partial.

    Every rank sees all `indices` (bags, size) of its embedding bags; rows of other ranks count as zero. The last rows
    may be padding, which no index reaches. Moves nothing.
    """
    num_rows = weight.shape[0]
    local = indices - part_of(axes_of(axes.get(ROWS, ()))) * num_rows
    counts = indices != padding_idx
    shares = (counts & (local >= 0) & (local < num_rows)).to(weight.dtype)
    if per_sample_weights is not None:
        shares = shares * per_sample_weights
    if MODES[mode] == "mean":
        shares = shares / counts.sum(1, keepdim=True).clamp(min=1)
    return F.embedding_bag(local.clamp(0, num_rows - 1), weight, mode="sum", per_sample_weights=shares)
