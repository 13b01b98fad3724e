"""Sample calls of losses of vectors, and of those that compare numbers with labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten

REDUCTIONS = (0, 1, 2)


def signs(d: Draw, *shape: int) -> Tensor:
    """Labels of -1 and 1."""
    return d.mask(*shape).double() * 2 - 1


def hinge(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), signs(d, a, b), 1.0, reduction) for reduction in REDUCTIONS]


def ranking(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.x(a, b), signs(d, a, 1), 0.1, reduction) for reduction in REDUCTIONS]


def poisson(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        *(sample(d.x(a, b), d.positive(a, b).detach(), True, False, 1e-8, reduction) for reduction in REDUCTIONS),
        sample(d.positive(a, b), d.positive(a, b).detach(), False, True, 1e-8, 1),
    ]


def soft_margin(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), signs(d, a, b), reduction) for reduction in REDUCTIONS]


def cosine_embedding(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        *(sample(d.x(a, b), d.x(a, b), signs(d, a), 0.1, reduction) for reduction in REDUCTIONS),
        sample(d.x(b), d.x(b), signs(d)),
    ]


def multi_margin(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        *(sample(d.x(a, b), d.index(b, a), 1, 1, None, reduction) for reduction in REDUCTIONS),
        sample(d.x(a, b), d.index(b, a), 2, 1, d.positive(b).detach()),
        sample(d.x(a, b), d.index(b, a), 1, 0.5, d.positive(b).detach(), 0),
    ]


def multilabel_margin(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    labels = torch.full((a, b), -1)
    labels[:, 0], labels[:, 1] = 1, d.index(b, a)
    return [sample(d.x(a, b), labels, reduction) for reduction in REDUCTIONS] + [sample(d.x(b), labels[0])]


def triplet(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        *(sample(d.x(a, b), d.x(a, b), d.x(a, b), 1.0, 2.0, 1e-6, False, reduction) for reduction in REDUCTIONS),
        sample(d.x(a, c, b), d.x(a, c, b), d.x(a, c, b), 1.0, 2.0, 1e-6, True),
    ]


def linear_cross_entropy(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    ignored = d.index(e, a, b)
    ignored[0, 1] = ignored[-1, -1] = -100
    kinds = (1, -100, torch.float64, 3), (2, 3, torch.float64, 1)
    return [
        *(sample(d.x(a, b, c), d.x(e, c), None, ignored if kind[1] < 0 else d.index(e, a, b), *kind) for kind in kinds),
        sample(d.x(a, c), d.x(e, c), d.x(e), d.index(e, a), *kinds[0]),
        sample(d.x(a, c), d.constant(e, c), d.x(e), d.index(e, a), *kinds[1]),
        sample(d.constant(a, c), d.x(e, c), None, d.index(e, a), *kinds[0]),
    ]


SAMPLES: dict[Any, Samples] = {
    LINEAR_CROSS_ENTROPY: linear_cross_entropy,
    aten.hinge_embedding_loss.default: hinge,
    aten.margin_ranking_loss.default: ranking,
    aten.poisson_nll_loss.default: poisson,
    aten.soft_margin_loss.default: soft_margin,
    aten.cosine_embedding_loss.default: cosine_embedding,
    aten.multi_margin_loss.default: multi_margin,
    aten.multilabel_margin_loss.default: multilabel_margin,
    aten.triplet_margin_loss.default: triplet,
}
