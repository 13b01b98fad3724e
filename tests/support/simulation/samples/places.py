"""Sample calls of operations that write to places that an index names, look elements up, or read between places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def scatter_reduce(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    index = d.index(b, a, 4)
    return [
        *(sample(d.positive(a, b), 1, index, d.positive(a, 4), how) for how in ("prod", "mean", "amax", "sum")),
        sample(d.positive(a, b), -1, index, d.positive(a, 4), "amin", include_self=False),
        sample(d.x(a, b), 1, index, d.x(a, 4), "sum", include_self=False),
        sample(d.x(a, b), 0, d.index(a, 2, b), d.x(2, b), "mean", include_self=False),
    ]


def index_copy(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        sample(d.x(a, b), 0, torch.randperm(a)[:2], d.x(2, b)),
        sample(d.x(a, b), -1, torch.randperm(b)[:4], d.x(a, 4)),
    ]


def index_fill(*values: Any) -> Samples:
    def samples(d: Draw) -> list[Sample]:
        a, b = d.sizes(2)
        return [sample(d.x(a, b), dim, torch.tensor([1, 3]), value) for dim in (0, -1) for value in values]

    return samples


def index_fill_tensor(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 6), 1, torch.tensor([1, 3]), d.x())]


def take(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.index(a * b, 10)), sample(d.x(a, b), d.index(a * b, 4, 6))]


def ascending(d: Draw, *shape: int) -> Tensor:
    return d.constant(*shape).sort(-1).values


def bucketize(d: Draw) -> list[Sample]:
    return [sample(d.constant(4, 6), ascending(d, 5)), sample(d.constant(8), ascending(d, 5), right=True)]


def searchsorted(d: Draw) -> list[Sample]:
    order = torch.stack([torch.randperm(5) for _ in range(4)])
    unsorted = torch.empty(4, 5, dtype=torch.float64).scatter_(1, order, ascending(d, 4, 5))
    return [
        sample(ascending(d, 5), d.constant(4, 6)),
        sample(ascending(d, 4, 5), d.constant(4, 6)),
        sample(unsorted, d.constant(4, 6), sorter=order),
    ]


def isin(d: Draw) -> list[Sample]:
    return [sample(d.index(9, 4, 6), torch.tensor([1, 5, 7])), sample(d.index(9, 8), torch.tensor([[1, 2], [3, 4]]))]


def quantile(d: Draw) -> list[Sample]:
    some = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    return [
        sample(d.x(4, 6), some, 1),
        sample(d.x(4, 6, 8), some, -2, True),
        sample(d.x(4, 6), some[0], 0),
        sample(d.x(4, 6), some),
    ]


def one_quantile(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 6), 0.3, 1), sample(d.x(4, 6, 8), 0.3, 0, True), sample(d.x(4, 6), 0.3)]


def grid_sampler(d: Draw) -> list[Sample]:
    return [
        sample(d.x(4, 6, 8, 10), d.constant(4, 12, 14, 2).clamp(-0.9, 0.9).requires_grad_(), 0, 0, False),
        sample(d.x(4, 6, 8, 10, 3), d.constant(4, 12, 14, 16, 3).clamp(-0.9, 0.9).requires_grad_(), 0, 1, True),
    ]


def prelu(d: Draw) -> list[Sample]:
    return [
        sample(d.x(4, 6, 8), d.x(6)),
        sample(d.x(4, 6), d.x(1)),
        sample(d.x(4), d.x(1)),
        sample(d.x(4, 6), d.x()),
    ]


def weight_norm(d: Draw) -> list[Sample]:
    """Along a dim between others, and along all: the kernel for the first and the last dim checks no shapes."""
    return [sample(d.x(4, 6, 8), d.x(1, 6, 1), 1), sample(d.x(4, 6), d.x(), -1)]


def diag_embed(d: Draw) -> list[Sample]:
    return [sample(d.x(4)), sample(d.x(4, 6)), sample(d.x(4, 6, 8), 1, 0, 2), sample(d.x(4, 6), -1, -1, 0)]


def folded(d: Draw) -> list[Sample]:
    return [
        sample(d.x(4, 6 * 6, 8), [4, 6], [2, 3], [1, 1], [0, 0], [2, 1]),
        sample(d.x(6 * 4, 15), [4, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
    ]


SAMPLES: dict[Any, Samples] = {
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill(0, 1.5),
    aten.index_fill.int_Tensor: index_fill_tensor,
    aten.index_reduce.default: lambda d: [
        sample(d.positive(4, 6), 1, d.index(6, 8), d.positive(4, 8), how) for how in ("prod", "mean", "amax")
    ],
    aten.diagonal_scatter.default: lambda d: [sample(d.x(4, 6, 8), d.x(4, 6), 0, 1, 2), sample(d.x(4, 6), d.x(4))],
    aten.unsafe_split_with_sizes.default: lambda d: [sample(d.x(4, 6), [2, 4], 1)],
    aten.take.default: take,
    aten.bucketize.Tensor: bucketize,
    aten.searchsorted.Tensor: searchsorted,
    aten.isin.Tensor_Tensor: isin,
    aten.isin.Tensor_Scalar: lambda d: [sample(d.index(3, 4, 6), 1)],
    **dict.fromkeys([aten.quantile.default, aten.nanquantile.default], quantile),
    **dict.fromkeys([aten.quantile.scalar, aten.nanquantile.scalar], one_quantile),
    aten.grid_sampler.default: grid_sampler,
    aten.prelu.default: prelu,
    aten._weight_norm.default: weight_norm,
    aten.diag_embed.default: diag_embed,
    aten.diagonal_copy.default: lambda d: [sample(d.x(4, 6, 8), 0, 1, 2), sample(d.x(4, 6), 1)],
    aten.rot90.default: lambda d: [sample(d.x(4, 6, 8), 1, [0, 2]), sample(d.x(4, 6), 2)],
    aten.col2im.default: folded,
    aten.channel_shuffle.default: lambda d: [sample(d.x(4, 6, 8, 10), 3)],
    aten.renorm.default: lambda d: [sample(d.x(4, 6, 8), 2.0, 1, 1.5)],
    aten.complex.default: lambda d: [sample(d.x(4, 6), d.x(6))],
}
