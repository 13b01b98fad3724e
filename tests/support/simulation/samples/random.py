"""Sample calls of operations that draw random numbers; some of them with nothing to draw."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def dropout(d: Draw) -> list[Sample]:
    return [
        sample(d.x(*d.sizes(2)), 0.5, True),
        sample(d.x(*d.sizes(2)), 0.5, False),
        sample(d.x(*d.sizes(3)), 0.0, True),
    ]


def binomial(d: Draw) -> list[Sample]:
    return [sample(torch.full((4, 6), 9.0, dtype=torch.float64), d.constant(4, 6).sigmoid())]


SAMPLES: dict[Any, Samples] = {
    **dict.fromkeys(
        [
            aten.dropout.default,
            aten.native_dropout.default,
            aten.feature_dropout.default,
            aten.feature_alpha_dropout.default,
            aten.alpha_dropout.default,
        ],
        dropout,
    ),
    **dict.fromkeys([aten.rand.default, aten.randn.default], lambda d: [sample(list(d.sizes(2)))]),
    **dict.fromkeys(
        [aten.rand_like.default, aten.randn_like.default, aten.poisson.default, aten._standard_gamma.default],
        lambda d: [sample(d.positive(*d.sizes(2)))],
    ),
    **dict.fromkeys(
        [
            aten.uniform.default,
            aten.normal_functional.default,
            aten.exponential.default,
            aten.cauchy.default,
            aten.log_normal.default,
        ],
        lambda d: [sample(d.constant(*d.sizes(2)))],
    ),
    aten.geometric.default: lambda d: [sample(d.constant(*d.sizes(2)), 0.1)],
    aten.random.default: lambda d: [sample(d.constant(*d.sizes(2)))],
    aten.random.to: lambda d: [sample(d.constant(*d.sizes(2)), 99)],
    aten.randint.default: lambda d: [sample(99, list(d.sizes(2)))],
    aten.randint.low: lambda d: [sample(3, 99, list(d.sizes(2)))],
    aten.randint_like.default: lambda d: [sample(d.constant(*d.sizes(2)), 99)],
    aten.randint_like.low_dtype: lambda d: [sample(d.constant(*d.sizes(2)), 3, 99)],
    aten.randperm.default: lambda d: [sample(24)],
    aten.bernoulli.default: lambda d: [sample(d.x(*d.sizes(2)).sigmoid().detach().requires_grad_())],
    aten.bernoulli.p: lambda d: [sample(d.constant(*d.sizes(2)), 0.5)],
    aten.bernoulli.Tensor: lambda d: [sample(d.x(4, 6), d.constant(4, 6).sigmoid())],
    aten.binomial.default: binomial,
    aten.normal.float_float: lambda d: [sample(1.0, 2.0, list(d.sizes(2)))],
    aten.normal.Tensor_float: lambda d: [sample(d.x(*d.sizes(2)), 2.0)],
    aten.normal.float_Tensor: lambda d: [sample(1.0, d.positive(*d.sizes(2)))],
    aten.normal.Tensor_Tensor: lambda d: [sample(d.x(6), d.positive(4, 6)), sample(d.x(4, 1), d.positive(4, 6))],
    aten.multinomial.default: lambda d: [
        sample(d.constant(4, 10).exp(), 6),
        sample(d.constant(10).exp(), 6, True),
    ],
    aten.rrelu.default: lambda d: [sample(d.x(*d.sizes(2)), 0.1, 0.3, True), sample(d.x(*d.sizes(2)))],
}
