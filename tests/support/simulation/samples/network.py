"""Sample calls of normalisation, embeddings, losses and random operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.capacity import WITHIN_CAPACITY
from autopar.ir.program.operators.embedding_bags import EMBEDDING_BAGS, RAGGED_EMBEDDING_BAGS
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY
from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten
IGNORED = -100


def layer_norm(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(a, b, c), [c], d.x(c), d.x(c)),
        sample(d.x(a, b, c), [c], d.x(c)),
        sample(d.x(a, c), [c]),
        sample(d.x(a, b, c), [b, c], d.x(b, c), d.x(b, c)),
        sample(d.x(c), [c], d.x(c), d.x(c)),
    ]


def native_layer_norm(d: Draw) -> list[Sample]:
    return [sample(*each.args, *(None,) * (4 - len(each.args)), 1e-5) for each in layer_norm(d)]


def rms_norm(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(a, b, c), [c], d.x(c), 1e-6),
        sample(d.x(a, c), [c], d.x(c)),
        sample(d.x(a, c), [c]),
        sample(d.x(a, b, c), [b, c], d.x(b, c)),
    ]


def group_norm(d: Draw) -> list[Sample]:
    n, h, w = d.sizes(3)
    return [
        sample(d.x(n, 12, h, w), 4, d.x(12), d.x(12)),
        sample(d.x(n, 12, h), 6),
        sample(d.x(n, 12), 4, d.x(12), d.x(12)),
        sample(d.x(n, 12, h), 1, d.x(12), d.x(12)),
        sample(d.x(n, 12, h), 12, d.x(12)),
    ]


def batch_norm(d: Draw) -> list[Sample]:
    """Statistics of the batch or the running ones, which the training form writes."""
    n, c, h = d.sizes(3)

    def statistics() -> tuple[Tensor, Tensor]:
        return d.constant(c), d.positive(c).detach()

    return [
        sample(x, *affine, *running, training, 0.1, 1e-5, False)
        for x in (d.x(n, c, h), d.x(n, c))
        for affine in ((d.x(c), d.x(c)), (None, None))
        for training in (True, False)
        for running in ([statistics(), (None, None)] if training else [statistics()])
    ]


def embedding(d: Draw) -> list[Sample]:
    v, e, a, b = d.sizes(4)
    return [
        sample(d.x(v, e), d.index(v, a, b)),
        sample(d.x(v, e), d.index(v, a)),
        sample(d.x(v, e), d.index(v, a, b), 1),
        sample(d.x(v, e), d.index(v)),
    ]


def ragged_bags(d: Draw) -> list[Sample]:
    """Sums, means and maxima of bags of several sizes."""
    v, e, n = d.sizes(3)
    offsets = torch.tensor([0, 1, 3])
    return [
        *(sample(d.x(v, e), d.index(v, n), offsets, None, mode, False, -1) for mode in (0, 1, 2)),
        sample(d.x(v, e), d.index(v, n), offsets, d.x(n), 0, False, 1),
    ]


def embedding_bags(d: Draw) -> list[Sample]:
    v, e, a, b = d.sizes(4)
    return [
        *(sample(d.x(v, e), d.index(v, a, b), None, mode, -1) for mode in (0, 1, 2)),
        *(sample(d.x(v, e), d.index(v, a, b), None, mode, 1) for mode in (0, 1, 2)),
        sample(d.x(v, e), d.index(v, a, b), d.x(a, b), 0, -1),
    ]


def one_hot(d: Draw) -> list[Sample]:
    return [sample(d.index(6, 4, 8), 6)]


def labels(d: Draw, num_classes: int, *shape: int) -> Tensor:
    """Classes, a third of them ignored; more in the first half than in the second."""
    found = torch.where(torch.rand(shape) < 0.3, IGNORED, d.index(num_classes, *shape))
    found.view(-1)[0] = IGNORED
    found.view(-1)[-1] = 0
    return found


def cross_entropy(d: Draw) -> list[Sample]:
    n, v, s = d.sizes(3)
    return [
        sample(d.x(n, v), d.index(v, n)),
        sample(d.x(n, v), labels(d, v, n)),
        *(sample(d.x(n, v), labels(d, v, n), None, reduction) for reduction in (0, 1, 2)),
        sample(d.x(n, v), labels(d, v, n), None, 1, IGNORED, 0.1),
        sample(d.x(n, v), labels(d, v, n), None, 2, IGNORED, 0.1),
        sample(d.x(n, v), labels(d, v, n), d.positive(v).detach()),
        sample(d.x(n, v), labels(d, v, n), d.positive(v).detach(), 2),
        sample(d.x(n, v, s), labels(d, v, n, s)),
        sample(d.x(n, v, s), labels(d, v, n, s), None, 2),
        *(sample(d.x(n, v), d.x(n, v).softmax(1).detach().requires_grad_(), None, r) for r in (0, 1, 2)),
        sample(d.x(n, v, s), d.x(n, v, s), d.positive(v).detach(), 1, IGNORED, 0.1),
        sample(d.x(v), d.constant(v).softmax(0)),
        sample(d.x(v), d.index(v)),
    ]


def cross_entropy_of_rows(d: Draw) -> list[Sample]:
    n, s, v = d.sizes(3)
    rest = IGNORED, 0.0
    return [
        *(sample(d.x(n, s, v), labels(d, v, n, s), None, reduction, *rest) for reduction in (0, 1, 2)),
        sample(d.x(n, v), labels(d, v, n), None, 1, *rest),
        sample(d.x(n, s, v), labels(d, v, n, s), d.positive(v).detach(), 1, IGNORED, 0.1),
        sample(d.x(n, s, v), labels(d, v, n, s), d.positive(v).detach(), 2, *rest),
    ]


def nll(d: Draw) -> list[Sample]:
    n, v = d.sizes(2)
    return [
        sample(d.x(n, v), labels(d, v, n), weight, reduction)
        for weight in (None, d.positive(v).detach())
        for reduction in (0, 1, 2)
    ]


def native_nll(d: Draw) -> list[Sample]:
    return [sample(*each.args, IGNORED) for each in nll(d)]


def distance(d: Draw) -> list[Sample]:
    """Mean, none and sum."""
    a, b = d.sizes(2)
    return [
        sample(d.x(a, b), d.x(a, b)),
        *(sample(d.x(a, b), d.x(a, b), reduction) for reduction in (0, 1, 2)),
    ]


def divergence(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.positive(a, b), reduction) for reduction in (0, 1, 2)]


def binary_cross_entropy(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    x, y = d.x(a, b).detach().sigmoid().requires_grad_(), d.constant(a, b).sigmoid()
    return [sample(x, y, None, reduction) for reduction in (0, 1, 2)] + [sample(x, y, d.positive(a, b).detach())]


def binary_cross_entropy_with_logits(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    x, y = d.x(a, b), d.constant(a, b).sigmoid()
    return [
        *(sample(x, y, None, None, reduction) for reduction in (0, 1, 2)),
        sample(x, y, None, d.positive(b).detach()),
    ]


SAMPLES: dict[Any, Samples] = {
    aten.layer_norm.default: layer_norm,
    aten.native_layer_norm.default: native_layer_norm,
    aten.rms_norm.default: rms_norm,
    aten._fused_rms_norm.default: lambda d: [sample(d.x(4, 6), [6], d.x(6), 1e-6)],
    aten.group_norm.default: group_norm,
    aten.batch_norm.default: batch_norm,
    aten.instance_norm.default: lambda d: [sample(d.x(4, 6, 8), d.x(6), d.x(6), None, None, True, 0.1, 1e-5, False)],
    aten.embedding.default: embedding,
    EMBEDDING_BAGS: embedding_bags,
    RAGGED_EMBEDDING_BAGS: ragged_bags,
    aten.one_hot.default: one_hot,
    WITHIN_CAPACITY: lambda d: [sample(d.index(3, *shape), 3, 0.5) for shape in ((4, 6, 2), (4, 6, 2, 1))],
    aten.cross_entropy_loss.default: cross_entropy,
    CROSS_ENTROPY: cross_entropy_of_rows,
    aten.nll_loss.default: nll,
    aten.nll_loss_nd.default: nll,
    aten.nll_loss_forward.default: native_nll,
    **dict.fromkeys(
        [aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default], distance
    ),
    aten.kl_div.default: divergence,
    aten.binary_cross_entropy.default: binary_cross_entropy,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    aten.cosine_similarity.default: lambda d: [
        sample(d.x(4, 6), d.x(4, 6)),
        sample(d.x(4, 6), d.x(4, 6), 0),
        sample(d.x(4, 1, 6), d.x(8, 6), -1),
    ],
    aten._grouped_mm.default: lambda d: [
        sample(
            d.x(12, 64).bfloat16().detach().requires_grad_(),
            d.x(3, 64, 128).bfloat16().detach().requires_grad_(),
            torch.tensor([4, 8, 12], dtype=torch.int32),
        )
    ],
}
