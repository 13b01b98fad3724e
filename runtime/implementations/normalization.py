"""BatchNorm over a batch of which each rank holds a part."""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.layout_moves import raw_sum
from autopar.runtime.collectives.mesh_axes import Axes, Axis, axes_of, num_parts_of

BATCH = "n"
"""The factor of the batch."""


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `aten.batch_norm.default` with dim 0 split; running statistics change in place, alike on all ranks.

    Moves, per axis that splits the batch, 2 · channels · 8 bytes forward (sums in float64) and, if `x` gets a gradient,
    2 · channels · max(4, itemsize) backward: one all-reduce each. Gradients of weight and bias are partial.
    """
    del cudnn_enabled
    if not training and running_mean is not None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    where = axes_of(axes.get(BATCH, ()))
    y, mean, variance = _BatchNorm.apply(x, weight, bias, eps, where)
    if running_mean is not None and running_var is not None:
        num_values = _num_values(x, where)
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (num_values / (num_values - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return y


def _num_values(x: Tensor, axes: tuple[Axis, ...]) -> int:
    return x.numel() // x.shape[1] * num_parts_of(axes)


def _per_channel(x: Tensor, ndim: int) -> Tensor:
    return x.reshape(1, -1, *[1] * (ndim - 2))


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: tuple[Axis, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.ndim) if d != 1]
        num_local = x.numel() // x.shape[1]
        num_values = _num_values(x, axes)
        variance, mean = torch.var_mean(wide, dims, correction=0)
        # In float64 the difference of squares below loses nothing that float32 would have held.
        mean, variance = mean.double(), variance.double()
        sums = torch.cat([mean * num_local, (variance + mean * mean) * num_local])
        total, total_square = raw_sum(sums, axes).chunk(2)
        mean = total / num_values
        variance = (total_square / num_values - mean * mean).clamp(min=0)
        scale = torch.rsqrt(variance + eps)
        ctx.axes, ctx.num_values = axes, num_values
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, mean, scale)
        normal = _normalized(wide, mean, scale)
        if weight is not None:
            normal = normal * _per_channel(weight, x.ndim)
        if bias is not None:
            normal = normal + _per_channel(bias, x.ndim)
        ctx.mark_non_differentiable(mean, variance)
        return normal.to(x.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        wide = grad.to(torch.promote_types(x.dtype, torch.float32))
        normal = _normalized(x.to(wide.dtype), mean, scale)
        dims = [d for d in range(x.ndim) if d != 1]
        grad_bias, grad_weight = wide.sum(dims), (wide * normal).sum(dims)
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = raw_sum(torch.cat([grad_bias, grad_weight]), ctx.axes) / ctx.num_values
            of_mean, of_scale = (_per_channel(each, x.ndim) for each in sums.chunk(2))
            factor = scale.to(wide.dtype) if weight is None else scale.to(wide.dtype) * weight
            grad_x = ((wide - of_mean - normal * of_scale) * _per_channel(factor, x.ndim)).to(x.dtype)
        return (
            grad_x,
            grad_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None,
            grad_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _normalized(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (x - _per_channel(mean.to(x.dtype), x.ndim)) * _per_channel(scale.to(x.dtype), x.ndim)
