"""Cross-entropy of logits of which each rank holds some rows, some classes, or both.

Over the axes that split the classes ("v"), the ranks join the maximum and the sums of every row; over the axes that
split rows, a mean joins its divisor, which depends on targets alone: it is summed ahead of the loss, overlapped with
the forward (`start_count`). Each rank has its part of a sum or mean over rows. The backward is local. Where no axis
splits the classes, a rank's part is PyTorch's own loss, which is the faster one.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.ir.program.operators.derivatives import called_directly, differentiated_once, once_differentiable
from autopar.runtime.collectives.direct import applied
from autopar.runtime.collectives.layout_moves import all_reduce_in_flight, raw_all_reduce, raw_sum, waited_for
from autopar.runtime.collectives.mesh_axes import Axes, Axis, axes_of, num_parts_of, one_axis_of, part_of

CLASSES = "v"
"""The factor of the classes; every other one is of rows."""
NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers for the argument `reduction`."""
WIDE = (torch.float32, torch.float64)
"""Dtypes in which a sum over rows is exact enough."""

COUNTED: dict[Callable[..., Tensor], tuple[str, str]] = {}
"""Losses that take a `divisor` → the factor of their classes, and the argument with weights of classes, if any."""
_Loss = TypeVar("_Loss", bound=Callable[..., Tensor])


def counted_ahead(classes: str, weighting: str = "") -> Callable[[_Loss], _Loss]:
    """Have a loss take the number of its rows, summed over ranks ahead of it, as its `divisor`."""

    def register(loss: _Loss) -> _Loss:
        COUNTED[loss] = classes, weighting
        return loss

    return register


@counted_ahead(CLASSES, "weight")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    divisor: Tensor | None = None,
) -> Tensor:
    """Compute `aten.cross_entropy_loss.default` for class targets; columns beyond `sizes["v"]` are padding.

    Moves, forward only, with b = max(4, itemsize) and local rows: per axis that splits the classes, b · rows ·
    (3 + [weight] + [smoothing] + [both]) by all-reduce (maximum, then sum, target logit, weight of the target,
    weighted sum of the logits, sum of the weights); over all axes that split rows, 8 for a mean's divisor, unless
    `divisor` is that sum on its way (`start_count`).
    """
    assert not target.is_floating_point(), "no rule splits a cross-entropy whose targets are probabilities"
    classes, rows = axes_of(axes.get(CLASSES, ())), rows_of(axes, CLASSES)
    if not classes and logits.dtype in WIDE:
        wanted = SUM if reduction == MEAN else reduction
        loss = torch.ops.aten.cross_entropy_loss(logits, target, weight, wanted, ignore_index, label_smoothing)
        if reduction != MEAN:
            return loss
        return applied(_Mean, loss, summed(divisor, lambda: _divisor(target, weight, ignore_index), rows))
    call = _Call(classes, rows, sizes[CLASSES], reduction, ignore_index, label_smoothing)
    return _CrossEntropy.apply(logits, target, weight, divisor, call)


@counted_ahead(CLASSES, "weight")
def cross_entropy_of_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    divisor: Tensor | None = None,
) -> Tensor:
    """Compute `autopar.cross_entropy_loss`, with classes last.

    Moves as much as `cross_entropy`.
    """
    given = logits.flatten(0, -2), target.flatten(), weight, reduction, ignore_index, label_smoothing
    loss = cross_entropy(*given, axes=axes, sizes=sizes, divisor=divisor)
    return loss.view(target.shape) if reduction == NONE else loss


def _divisor(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the divisor of a mean over this rank's rows: their number, or the sum of their targets' weights.

    Ignored targets do not count.
    """
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return (weight.detach()[target.masked_fill(~kept, 0)] * kept).sum(dtype=torch.float64)


def rows_of(axes: Axes, classes: str) -> Axis | None:
    """Return the axes that split rows, as one; None where none does."""
    return one_axis_of({name for factor, names in axes.items() if factor != classes for name in names})


def start_count(target: Tensor, ignore_index: int, *, axes: Axes, classes: str) -> Tensor:
    """Begin to sum how many targets of all ranks are not ignored: the `divisor` of a mean, which waits for it.

    Moves 8 bytes by all-reduce over all axes that split rows. Compiled graphs wait for it at once.
    """
    rows, own = rows_of(axes, classes), _divisor(target, None, ignore_index)
    if rows is None:
        return own
    if torch.compiler.is_dynamo_compiling():
        return raw_all_reduce(own, rows)
    return all_reduce_in_flight(own, rows)


def summed(divisor: Tensor | None, own: Callable[[], Tensor], rows: Axis | None) -> Tensor:
    """Return the divisor of all ranks' rows: the one on its way once it is there, or the sum of each one's `own`."""
    if divisor is not None:
        return waited_for(divisor)
    return own() if rows is None else raw_all_reduce(own(), rows)


@called_directly
class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, divisor: Tensor) -> Tensor:
        if divisor.is_floating_point():  # `_narrow`, without a call
            divisor = divisor.to(total.dtype)
        ctx.save_for_backward(divisor)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            return differentiated_once(_Mean.backward, ctx, (grad,))
        (divisor,) = ctx.saved_tensors
        return grad / divisor, None


def _narrow(divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a divisor by which numbers of a dtype keep it: a number of rows as it is."""
    return divisor.to(dtype) if divisor.is_floating_point() else divisor


@dataclass(frozen=True, slots=True)
class _Call:
    classes: tuple[Axis, ...]
    rows: Axis | None
    num_classes: int
    reduction: int
    ignore_index: int
    smoothing: float

    @property
    def smoothing_per_class(self) -> float:
        return self.smoothing / self.num_classes


@dataclass(frozen=True, slots=True)
class _Columns:
    """This rank's classes. Legend: N rows (any number of dims), V classes."""

    start: Any
    number: int
    padding_V: Tensor | None
    """Mask of the columns that are padding; None if there are none."""
    weight_V: Tensor | None
    """Weights of classes, 0 for padding; None if all are 1."""

    @classmethod
    def of(cls, call: _Call, x_NV: Tensor, weight_V: Tensor | None) -> _Columns:
        number = x_NV.shape[-1]
        start = part_of(call.classes) * number
        padding_V = None
        if number * num_parts_of(call.classes) != call.num_classes:
            padding_V = torch.arange(number, device=x_NV.device) + start >= call.num_classes
        if weight_V is not None:
            weight_V = weight_V.to(x_NV.dtype)
            weight_V = weight_V if padding_V is None else weight_V.masked_fill(padding_V, 0)
        return cls(start, number, padding_V, weight_V)

    def fill(self, x_NV: Tensor, value: float) -> Tensor:
        """Return the values with `value` in the columns that are padding."""
        return x_NV if self.padding_V is None else x_NV.masked_fill(self.padding_V, value)

    def of_target(self, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of every target, and a mask of targets that are on other ranks."""
        wanted_N = target_N - self.start
        column_N = wanted_N.clamp(0, self.number - 1)
        return column_N, wanted_N != column_N

    def weighted(self, x: Tensor) -> Tensor:
        """Return values that end in columns, times the weights of the classes."""
        return x if self.weight_V is None else x * self.weight_V


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target_N: Tensor, weight: Tensor | None, count: Tensor | None, call: _Call
    ) -> Tensor:
        x_NV = _wide(logits)
        columns = _Columns.of(call, x_NV, weight)
        x_NV = columns.fill(x_NV, -math.inf)
        top_N = x_NV.amax(-1)
        for axis in call.classes:
            top_N = raw_all_reduce(top_N, axis, "max")
        column_N, elsewhere_N = columns.of_target(target_N)
        x_NV = _subtract(x_NV, top_N, logits)
        sums = [x_NV.gather(-1, column_N.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere_N, 0)]
        if columns.weight_V is not None:
            sums.append(columns.weight_V[column_N].masked_fill_(elsewhere_N, 0))
        if call.smoothing:
            sums.append(columns.weighted(columns.fill(x_NV, 0)).sum(-1))
            if columns.weight_V is not None:
                sums.append(columns.weight_V.sum().expand_as(top_N))
        sums.insert(0, x_NV.exp_().sum(-1))
        rest = list(raw_sum(torch.stack(sums), call.classes).unbind())
        log_N, picked_N = rest.pop(0).log(), rest.pop(0)
        ignored_N = target_N == call.ignore_index
        weight_N = smooth_N = None
        loss_N = log_N - picked_N
        if weight is not None:
            weight_N = rest.pop(0).masked_fill(ignored_N, 0)
            loss_N = weight_N * loss_N
        if call.smoothing:
            of_all_N = rest.pop(0)
            total = rest.pop(0) if weight is not None else call.num_classes
            smooth_N = (~ignored_N).to(log_N.dtype) * (total * call.smoothing_per_class)
            loss_N = loss_N * (1 - call.smoothing) + (total * log_N - of_all_N) * call.smoothing_per_class
        loss, divisor = loss_N.masked_fill_(ignored_N, 0), None
        if call.reduction != NONE:
            loss = loss.sum()
        if call.reduction == MEAN:
            divisor = summed(count, lambda: _sum_of_shares(weight_N, ignored_N), call.rows)
            divisor = _narrow(divisor, loss.dtype)
            loss = loss / divisor
        ctx.call = call
        saved = log_N + top_N, column_N, elsewhere_N, ignored_N, weight_N, smooth_N, divisor
        ctx.save_for_backward(logits, weight, *saved)
        return loss.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: _Call = ctx.call
        logits, weight, log_N, column_N, elsewhere_N, ignored_N, weight_N, smooth_N, divisor = ctx.saved_tensors
        x_NV = _wide(logits)
        columns = _Columns.of(call, x_NV, weight)
        grad_NV = _subtract(x_NV, log_N, logits).exp_()
        hit_N = elsewhere_N.to(grad_NV.dtype).sub_(1)  # -1 where the target is on this rank
        share_N: Any = (1 if weight_N is None else weight_N) * (1 - call.smoothing)
        every_N = share_N if smooth_N is None else share_N + smooth_N
        if isinstance(every_N, Tensor):
            grad_NV.mul_(every_N.unsqueeze(-1))
            hit_N = hit_N * share_N
        grad_NV.scatter_add_(-1, column_N.unsqueeze(-1), hit_N.unsqueeze(-1))
        if call.smoothing:
            grad_NV.sub_(columns.weighted(~ignored_N.unsqueeze(-1)) * call.smoothing_per_class)
        # Ignored rows get zero even where nothing is left to divide by.
        grad = grad.to(grad_NV.dtype)
        grad_N = torch.where(ignored_N, 0.0, grad if divisor is None else grad / divisor)
        # Padding may hold anything, even what overflows.
        grad_NV = columns.fill(grad_NV.mul_(grad_N.unsqueeze(-1)), 0)
        back = grad_NV.movedim(-1, 1) if logits.ndim > 1 else grad_NV
        return back.to(logits.dtype), None, None, None, None


def _sum_of_shares(weight_N: Tensor | None, ignored_N: Tensor) -> Tensor:
    """Return the sum of the weights of rows that are not ignored, or their number."""
    return (~ignored_N).sum() if weight_N is None else weight_N.sum(dtype=torch.float64)


def _wide(logits: Tensor) -> Tensor:
    """Return the logits in at least float32, classes last."""
    moved = logits.movedim(1, -1) if logits.ndim > 1 else logits
    return moved if moved.dtype in WIDE else moved.float()


def _subtract(x_NV: Tensor, by_N: Tensor, logits: Tensor) -> Tensor:
    """Return the wide logits less a number for each row, in a tensor that nobody else holds."""
    if x_NV.dtype == logits.dtype:  # they are the logits themselves, or may be
        return x_NV - by_N.unsqueeze(-1)
    return x_NV.sub_(by_N.unsqueeze(-1))
