"""Attention's dropout mask looks random in every way that matters, and is the same for any part of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar.ir.program.operators.attention.dropout import Dropout, lines_of

QUERIES, KEYS = 1024, 768


def of(p: float, seed: int = 5, samples: int = 1, heads: int = 1) -> Dropout:
    lines = lines_of(torch.tensor(seed), torch.arange(samples), torch.arange(heads))
    return Dropout.of(p, lines, torch.arange(QUERIES), torch.arange(KEYS))


def centred(dropped: Tensor, p: float) -> Tensor:
    """Standardize a dropout mask to mean 0 and variance 1, for elements dropped with probability `p`."""
    return (dropped.double() - p) / math.sqrt(p * (1 - p))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_that_is_dropped_is_the_probability(p: float) -> None:
    dropped = of(p).dropped().double()
    assert abs(float(dropped.mean()) - p) <= 6 * math.sqrt(p * (1 - p) / dropped.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_columns_and_pairs_of_them_are_independent(p: float) -> None:
    """Sums over rows and columns vary as sums of independent draws do, and so do products of two rows, or columns."""
    x = centred(of(p).dropped()[0, 0], p)
    for each in (x, x.T):
        of_rows = each.sum(1) / math.sqrt(each.shape[1])
        assert abs(float(of_rows.var()) - 1) < 0.3
        products = (each @ each.T / math.sqrt(each.shape[1]))[~torch.eye(each.shape[0], dtype=torch.bool)]
        assert abs(float(products.square().mean()) - 1) < 0.02
        assert float(products.abs().max()) < 8


def test_seeds_samples_and_heads_drop_others() -> None:
    p = 0.5
    masks = [*of(p, 5, 2, 2).dropped().flatten(0, 1), *of(p, 6).dropped()[0], of(p, 5, 2, 2).dropped()[0, 0]]
    for i, one in enumerate(masks):
        for j, other in enumerate(masks[:i]):
            same = float((centred(one, p) * centred(other, p)).mean())
            assert abs(same - ((i, j) == (5, 0))) < 6 / math.sqrt(one.numel())


def test_a_part_drops_what_the_whole_does_there() -> None:
    whole = of(0.3, 1, 2, 3)
    part = whole.part((100, 164), (32, 300)).part((4, 9), (7, 8))
    assert torch.equal(part.dropped(), whole.dropped()[:, :, 104:109, 39:40])


def test_what_was_drawn_elsewhere_is_dropped_as_it_was() -> None:
    kept = torch.rand(2, 3, 4, 8) > 0.5
    dropped = Dropout.of(0.5, kept, torch.arange(4), torch.tensor([6, 7, 1])).part((1, 3), (0, 3)).dropped()
    assert torch.equal(dropped, ~kept[:, :, 1:3, [6, 7, 1]])
