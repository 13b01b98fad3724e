"""The cross-entropy of a linear layer's outputs in tiles of rows, so that all logits are never there at once.

    linear_cross_entropy(hidden, weight, bias, target, reduction, ignore_index, dtype, tiles) -> loss

One tile after the other computes its logits, from them the loss, and at once the gradients of hidden states,
weight and bias for a loss of one; the backward only scales these. The field calls it fused linear cross-entropy (Hsu
et al., "Liger Kernel", 2024), or a tiled or chunked loss. `capture.tiles.tiled_losses` finds the place of this operator
in a model's graph, `runtime.implementations.tiled_loss` runs it on ranks. Legend:

    N rows: samples times positions   T rows of a tile   D features   V classes, or this rank's part of them
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.program.operators.derivatives import once_differentiable

MEAN, SUM = 1, 2
"""PyTorch's numbers for the argument `reduction`."""
CHOSEN = 0
"""Stand-in for a number of tiles that a plan has yet to choose."""


def rows_of_tiles(num_rows: int, tiles: int) -> list[int]:
    """Return the number of rows of each tile: equal for all but the last; there are no more tiles than rows.

    >>> rows_of_tiles(10, 4), rows_of_tiles(2, 4)
    ([3, 3, 3, 1], [1, 1])
    """
    each = -(-num_rows // max(tiles, 1))
    full = int(num_rows // each)
    rest = num_rows - each * full
    return [each] * full + [rest] * bool(rest)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, float32 or wider, in which losses are computed and gradients of tiles are summed."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Loss:
    """Settings of a call of the operator, apart from its tensors."""

    reduction: int
    ignore_index: int
    dtype: torch.dtype
    """Dtype of the logits as the loss takes them, and of the loss."""
    tiles: int
    learns: tuple[bool, bool, bool]
    """True for each of hidden states, weight and bias that needs a gradient."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Communication with ranks that have other classes, or other rows, for the case that there are none."""

    def columns(self, target_T: Tensor, num_columns: int) -> tuple[Tensor, Tensor | None]:
        """Return the column of every target and a mask of targets on this rank; no mask if all are."""
        return target_T, None

    def without_padding(self, logits_TV: Tensor) -> Tensor:
        """Return the logits, minus infinity in columns that are padding."""
        return logits_TV

    def largest(self, top_T: Tensor) -> Tensor:
        """Return the largest over all ranks' classes."""
        return top_T

    def sum_of_classes(self, sums: Tensor) -> Tensor:
        """Return the sum over all ranks' classes."""
        return sums

    def count_of_all(self, count: Tensor) -> Tensor:
        """Return the number of rows that count of all ranks'."""
        return count


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients for a loss gradient of one, which tiles write or add to; None if a tensor needs none."""

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def like(cls, hidden_ND: Tensor, weight_VD: Tensor, learns: tuple[bool, bool, bool]) -> _Gradients:
        added = wide(weight_VD.dtype)
        return cls(
            torch.empty_like(hidden_ND) if learns[0] else None,
            torch.zeros_like(weight_VD, dtype=added) if learns[1] else None,
            weight_VD.new_zeros(weight_VD.shape[0], dtype=added) if learns[2] else None,
        )

    @property
    def needed(self) -> bool:
        return any(each is not None for each in (self.hidden_ND, self.weight_VD, self.bias_V))

    def add(self, grad_TV: Tensor, h_TD: Tensor, weight_VD: Tensor, start: int, stop: int) -> None:
        """Add the gradients of hidden states and weight, given those of the logits of rows from `start` to `stop`."""
        if self.hidden_ND is not None:
            self.hidden_ND[start:stop] = grad_TV @ weight_VD
        if self.weight_VD is not None and self.weight_VD.dtype == grad_TV.dtype:
            self.weight_VD.addmm_(grad_TV.t(), h_TD)
        elif self.weight_VD is not None:
            self.weight_VD.add_(grad_TV.t() @ h_TD)


def _loss_of_tiles(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, loss: Loss, ranks: Alone
) -> tuple[Tensor, Tensor, _Gradients]:
    """Return the sum over rows, how many of these count, in double precision, and the gradients of that sum."""
    found = _Gradients.like(hidden_ND, weight_VD, loss.learns)
    total = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
    kept_N = target_N != loss.ignore_index
    for start, stop in tiles_of_rows(hidden_ND.shape[0], loss.tiles):
        rows = hidden_ND[start:stop], target_N[start:stop], kept_N[start:stop]
        loss_T, grad_TV = _loss_of_rows(*rows, weight_VD, bias_V, found, ranks)
        total = total + loss_T.sum(dtype=torch.float64)
        if grad_TV is not None:
            found.add(grad_TV, rows[0], weight_VD, start, stop)
        del grad_TV, rows  # before the next tile
    return total, kept_N.sum(dtype=torch.float64), found


def _loss_of_rows(
    h_TD: Tensor,
    target_T: Tensor,
    kept_T: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    found: _Gradients,
    ranks: Alone,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each row, and the gradients of the logits where some are needed."""
    p_TV = F.linear(h_TD, weight_VD, bias_V).to(wide(h_TD.dtype))
    p_TV = ranks.without_padding(p_TV)
    p_TV.sub_(ranks.largest(p_TV.amax(-1)).unsqueeze(-1))
    column_T, mine_T = ranks.columns(target_T.masked_fill(~kept_T, 0), p_TV.shape[-1])
    zero_T = torch.zeros_like(column_T, dtype=p_TV.dtype)
    picked_T, one_T = p_TV.gather(-1, column_T.unsqueeze(-1)).squeeze(-1), zero_T + 1
    if mine_T is not None:
        picked_T, one_T = (torch.where(mine_T, each_T, zero_T) for each_T in (picked_T, one_T))
    p_TV.exp_()
    sum_T, picked_T = ranks.sum_of_classes(torch.stack([p_TV.sum(-1), picked_T])).unbind()
    loss_T = (sum_T.log() - picked_T).masked_fill(~kept_T, 0)
    if not found.needed:
        return loss_T, None
    p_TV.div_(sum_T.unsqueeze(-1))
    p_TV.scatter_add_(-1, column_T.unsqueeze(-1), -one_T.unsqueeze(-1))
    p_TV.masked_fill_(~kept_T.unsqueeze(-1), 0)
    if found.bias_V is not None:
        found.bias_V.add_(p_TV.sum(0))
    return loss_T, p_TV.to(h_TD.dtype)


def tiles_of_rows(num_rows: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each tile, and the row behind its last."""
    start = 0
    for count in rows_of_tiles(num_rows, tiles):
        yield start, start + count
        start += count


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of hidden (N, D), weight (V, D), bias (V) or None, and target (N), with the gradients kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        loss: Loss,
        ranks: Alone,
    ) -> Tensor:
        total, count, found = _loss_of_tiles(hidden_ND, weight_VD, bias_V, target_N, loss, ranks)
        if loss.reduction == MEAN:
            count = ranks.count_of_all(count)
            total = total / count
        ctx.mean, ctx.dtypes = loss.reduction == MEAN, (hidden_ND.dtype, weight_VD.dtype)
        ctx.save_for_backward(found.hidden_ND, found.weight_VD, found.bias_V, count)
        return total.to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden_ND, weight_VD, bias_V, count = ctx.saved_tensors
        scale = grad.to(wide(grad.dtype))
        if ctx.mean:  # if all rows are ignored, the loss is NaN and the gradients are zero
            scale = torch.where(count > 0, scale / count.clamp(min=1).to(scale.dtype), torch.zeros_like(scale))
        of_hidden, of_weight = ctx.dtypes
        return (
            None if hidden_ND is None else _scaled(hidden_ND, scale, of_hidden),
            None if weight_VD is None else _scaled(weight_VD, scale, of_weight),
            None if bias_V is None else _scaled(bias_V, scale, of_weight),
            *(None,) * 3,
        )


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient times the scale in the dtype of its tensor, without a wider one between."""
    if gradient.dtype == dtype:
        return gradient * scale
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def loss_in_tiles(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
    tiles: int,
    ranks: Alone,
) -> Tensor:
    """Compute the operator's loss for this rank's rows and classes."""
    learns = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias))
    loss = Loss(reduction, ignore_index, dtype, tiles, learns)  # pyright: ignore[reportArgumentType]
    return LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, bias, target.flatten(), loss, ranks)


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
    tiles: int,
) -> Tensor:
    return loss_in_tiles(hidden, weight, bias, target, reduction, ignore_index, dtype, tiles, Alone())


torch.library.define(
    "autopar::linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int reduction, int ignore_index, ScalarType dtype,"
    " int tiles) -> Tensor",
)
# A composite: its derivative is that of what it calls.
torch.library.impl("autopar::linear_cross_entropy", "CompositeImplicitAutograd", _linear_cross_entropy)

LINEAR_CROSS_ENTROPY: torch._ops.OpOverload = torch.ops.autopar.linear_cross_entropy.default
"""hidden (…, D), weight (V, D), bias (V), target (…) of classes → (), a sum or a mean over rows; tiles, or CHOSEN."""
