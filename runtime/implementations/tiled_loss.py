"""A linear layer with its cross-entropy in tiles on ranks, of which each has some rows, some classes, or both.

Over the axes that split classes ("o") the ranks join the maximum and two sums of every row, tile by tile; over the
axes that split rows, a mean joins its count, ahead of the loss (`loss.start_count`), and each rank has its part of the
mean. The backward is local.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.program.operators.linear_cross_entropy import Alone, loss_in_tiles
from autopar.runtime.collectives.layout_moves import raw_all_reduce, raw_sum
from autopar.runtime.collectives.mesh_axes import Axes, Axis, axes_of, num_parts_of, part_of
from autopar.runtime.implementations.loss import counted_ahead, rows_of, summed

CLASSES = "o"
"""The factor of the classes; every other one is of rows."""


@counted_ahead(CLASSES)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
    tiles: int,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    in_tiles: int,
    divisor: Tensor | None = None,
) -> Tensor:
    """Compute `autopar.linear_cross_entropy` in tiles; classes beyond `sizes["o"]` are padding.

    Moves, forward only, with b = max(4, itemsize) and local rows: per axis that splits the classes, 3 · b · rows by
    all-reduce, in two messages for each tile; over all axes that split rows, 8 for a mean's count, unless `divisor`
    is that sum on its way.
    """
    ranks = _Ranks(axes_of(axes.get(CLASSES, ())), rows_of(axes, CLASSES), sizes[CLASSES], divisor)
    return loss_in_tiles(hidden, weight, bias, target, reduction, ignore_index, dtype, in_tiles, ranks)


@dataclass(frozen=True, slots=True)
class _Ranks(Alone):
    """The axes over which ranks have other classes, and other rows."""

    classes: tuple[Axis, ...]
    rows: Axis | None
    num_classes: int
    divisor: Tensor | None

    def columns(self, target_T: Tensor, num_columns: int) -> tuple[Tensor, Tensor | None]:
        if not self.classes:
            return target_T, None
        wanted_T = target_T - part_of(self.classes) * num_columns
        column_T = wanted_T.clamp(0, num_columns - 1)
        return column_T, wanted_T == column_T

    def without_padding(self, logits_TV: Tensor) -> Tensor:
        num_columns = logits_TV.shape[-1]
        if num_columns * num_parts_of(self.classes) == self.num_classes:
            return logits_TV
        column_V = torch.arange(num_columns, device=logits_TV.device) + part_of(self.classes) * num_columns
        return logits_TV.masked_fill_(column_V >= self.num_classes, -torch.inf)

    def largest(self, top_T: Tensor) -> Tensor:
        for axis in self.classes:
            top_T = raw_all_reduce(top_T, axis, "max")
        return top_T

    def sum_of_classes(self, sums: Tensor) -> Tensor:
        return raw_sum(sums, self.classes)

    def count_of_all(self, count: Tensor) -> Tensor:
        return summed(self.divisor, lambda: count, self.rows)
