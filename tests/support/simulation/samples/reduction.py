"""Sample calls of operations that sum, compare, sort or normalise along dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def over_dims(d: Draw) -> list[Sample]:
    return [
        sample(d.x(*d.sizes(3)), [1]),
        sample(d.x(*d.sizes(3)), [0, -1]),
        sample(d.x(*d.sizes(3)), [-1], True),
        sample(d.x(*d.sizes(2)), [0, 1], True),
        sample(d.x(*d.sizes(2)), [0], dtype=torch.float64),
    ]


def over_dims_or_all(d: Draw) -> list[Sample]:
    return [*over_dims(d), sample(d.x(*d.sizes(2)), None), sample(d.x(*d.sizes(2)), [])]


def over_dims_without_dtype(d: Draw) -> list[Sample]:
    return [each for each in over_dims(d) if not each.kwargs]


def over_one_dim(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(3)), 1), sample(d.x(*d.sizes(2)), -1, True), sample(d.x(*d.sizes(2)), 0)]


def over_all(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(n))) for n in (1, 2, 3)]


def few(d: Draw, num_dims: int, value: bool) -> Tensor:
    """A mask that has `value` only at its first element."""
    found = torch.full(d.sizes(num_dims), not value)
    found[(0,) * num_dims] = value
    return found


def few_over_one_dim(value: bool) -> Samples:
    return lambda d: [sample(few(d, 3, value), 1), sample(few(d, 2, value), -1, True)]


def few_over_all(value: bool) -> Samples:
    return lambda d: [sample(few(d, 2, value))]


def along(*further: Any) -> Samples:
    """An operation that keeps the shape and works along one dim."""

    def samples(d: Draw) -> list[Sample]:
        return [sample(d.x(*d.sizes(3)), dim, *further) for dim in (0, 1, -1)]

    return samples


def argmax(d: Draw) -> list[Sample]:
    x = d.constant(*d.sizes(2))
    x[-1, -1], x[-1, -2] = 9, -9  # not at position 0, which would pass for a partial zero
    return [sample(d.x(*d.sizes(2)), 1), sample(d.x(*d.sizes(3)), -1, True), sample(x)]


def topk(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), 3), sample(d.x(*d.sizes(3)), 2, 1), sample(d.x(*d.sizes(2)), 2, -2, False)]


def vector_norm(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), 2, [1]), sample(d.x(*d.sizes(3)), 2, [-1], True), sample(d.x(*d.sizes(2)))]


def variance(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), [1]), sample(d.x(*d.sizes(3)), [-1], correction=0, keepdim=True)]


SAMPLES: dict[Any, Samples] = {
    aten.sum.dim_IntList: over_dims_or_all,
    aten.mean.dim: over_dims_or_all,
    **dict.fromkeys([aten.sum.default, aten.mean.default, aten.max.default, aten.min.default], over_all),
    **dict.fromkeys([aten.amax.default, aten.amin.default, aten.logsumexp.default], over_dims_without_dtype),
    **dict.fromkeys([aten.max.dim, aten.min.dim, aten.prod.dim_int, aten.median.dim], over_one_dim),
    aten.any.dim: few_over_one_dim(True),
    aten.all.dim: few_over_one_dim(False),
    aten.any.default: few_over_all(True),
    aten.all.default: few_over_all(False),
    **dict.fromkeys([aten.argmax.default, aten.argmin.default], argmax),
    **dict.fromkeys([aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten.cumprod.default], along()),
    **dict.fromkeys([aten._softmax.default, aten._log_softmax.default], along(False)),
    aten._safe_softmax.default: along(),
    **dict.fromkeys([aten.sort.default, aten.argsort.default, aten.cummax.default, aten.cummin.default], along()),
    aten.argsort.stable: lambda d: [sample(d.x(*d.sizes(2)), stable=True, dim=dim) for dim in (0, -1)],
    **dict.fromkeys([aten.nanmedian.dim, aten.mode.default], over_one_dim),
    **dict.fromkeys([aten.median.default, aten.nanmedian.default, aten.norm.Scalar], over_all),
    aten.aminmax.default: lambda d: [
        sample(d.x(4, 6), dim=1),
        sample(d.x(4, 6), dim=0, keepdim=True),
        sample(d.x(4, 6)),
    ],
    aten.any.dims: lambda d: [sample(few(d, 3, True), [1]), sample(few(d, 2, True), [0, 1])],
    aten.all.dims: lambda d: [sample(few(d, 3, False), [1]), sample(few(d, 2, False), [0, 1])],
    aten.count_nonzero.default: lambda d: [sample(d.index(2, 4, 6), None), sample(d.index(2, 4, 6), 1)],
    aten.dist.default: lambda d: [sample(d.x(4, 6), d.x(4, 6))],
    aten.norm.ScalarOpt_dtype: lambda d: [sample(d.x(4, 6), 2, dtype=torch.float64)],
    aten.norm.ScalarOpt_dim_dtype: lambda d: [sample(d.x(4, 6), 2, [1], True, dtype=torch.float64)],
    aten.trace.default: lambda d: [sample(d.x(4, 6))],
    aten.sort.stable: lambda d: [sample(d.x(*d.sizes(2)), stable=True, dim=dim) for dim in (0, -1)],
    aten.logcumsumexp.default: along(),
    aten.glu.default: along(),
    aten.diff.default: lambda d: [sample(d.x(*d.sizes(2))), sample(d.x(*d.sizes(2)), 1, 0)],
    aten.topk.default: topk,
    aten.kthvalue.default: lambda d: [sample(d.x(*d.sizes(2)), 2), sample(d.x(*d.sizes(2)), 1, 0)],
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.ScalarOpt_dim: lambda d: [sample(d.x(*d.sizes(2)), 2, [1]), sample(d.x(*d.sizes(2)), 2, [0], True)],
    **dict.fromkeys([aten.var.correction, aten.std.correction, aten.var_mean.correction], variance),
    aten.prod.default: lambda d: [sample(d.positive(*d.sizes(n))) for n in (1, 2)],
    aten.var.dim: lambda d: [sample(d.x(*d.sizes(2)), [1]), sample(d.x(*d.sizes(2)), [0], False, True)],
    aten.var_mean.dim: lambda d: [sample(d.x(*d.sizes(2)), [1])],
    aten.count_nonzero.dim_IntList: lambda d: [sample(d.index(2, 4, 6), [1])],
    aten.nansum.default: over_dims,
    aten.std.default: over_all,
    aten.std.dim: lambda d: [sample(d.x(*d.sizes(2)), [1]), sample(d.x(*d.sizes(2)), [0], False, True)],
    aten.std_mean.correction: variance,
    aten.histc.default: lambda d: [sample(d.constant(10), 4, -2, 2)],
}
