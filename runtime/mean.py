"""Means over split dims: each rank's mean, divided by the number of parts, so that the sum over the ranks is the mean.

The dims are named as the rules in `autopar.strategies` name them, a, b, c … from the first. Elements that only pad a
dim to equal parts count neither in the sum nor in the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.collectives import axis_of
from autopar.strategies.notation import dims_of, names

aten = torch.ops.aten

NONE = 0
"""PyTorch's number for `reduction="none"`."""

Axes = Mapping[str, Sequence[str]]
Sizes = Mapping[str, int]


def mean(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    axes: Axes,
    sizes: Sizes,
) -> Tensor:
    """This rank's share of the mean over `dim` (None: all dims)."""
    averaged = sorted(dims_of(dim, x.ndim))
    return torch.mean(_without_padding(x, averaged, axes, sizes), averaged, keepdim, dtype=dtype) * _share(
        x, averaged, sizes
    )


def _share(x: Tensor, dims: Iterable[int], sizes: Sizes) -> float:
    """Local elements over global ones, padding included in the former."""
    factors = names(x.ndim)
    return math.prod(x.shape[dim] / sizes[factors[dim]] for dim in dims)


def _without_padding(x: Tensor, dims: Iterable[int], axes: Axes, sizes: Sizes) -> Tensor:
    """The tensor with zeros in the place of padding."""
    factors = names(x.ndim)
    for dim in dims:
        split = axes.get(factors[dim], ())
        part, size = x.shape[dim], sizes[factors[dim]]
        # A dim that several axes split divides; only one that a single axis splits is ever padded.
        if len(split) == 1 and part * axis_of(split[0]).size != size:
            place = torch.arange(part, device=x.device) + axis_of(split[0]).rank * part
            inside = (place < size).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
            x = torch.where(inside, x, torch.zeros((), dtype=x.dtype, device=x.device))
    return x


def _in_parts(name: str, op: torch._ops.OpOverload) -> Callable[..., Tensor]:
    """The mean of a loss of two tensors, taken element by element."""
    arguments = [argument.name for argument in op._schema.arguments]
    num_tensors = 2

    def loss(*args: Any, axes: Axes, sizes: Sizes, **kwargs: Any) -> Tensor:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        x = given["self"]
        dims = range(x.ndim)
        parts = [_without_padding(given[each], dims, axes, sizes) for each in arguments[:num_tensors]]
        if all(before is after for before, after in zip(parts, (x, given["target"]), strict=True)):
            return op(**given) * _share(x, dims, sizes)
        given |= {**dict(zip(arguments, parts, strict=False)), "reduction": NONE}
        return mean(op(**given), axes=axes, sizes=sizes)

    loss.__name__ = loss.__qualname__ = name
    return loss


mse_loss = _in_parts("mse_loss", aten.mse_loss.default)
l1_loss = _in_parts("l1_loss", aten.l1_loss.default)
smooth_l1_loss = _in_parts("smooth_l1_loss", aten.smooth_l1_loss.default)
huber_loss = _in_parts("huber_loss", aten.huber_loss.default)
kl_div = _in_parts("kl_div", aten.kl_div.default)
binary_cross_entropy = _in_parts("binary_cross_entropy", aten.binary_cross_entropy.default)
binary_cross_entropy_with_logits = _in_parts(
    "binary_cross_entropy_with_logits", aten.binary_cross_entropy_with_logits.default
)
