"""Blocks with dropout, tile by tile, give what all probabilities at once give, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar.ir.program.operators.attention import tiles
from autopar.ir.program.operators.attention.dropout import Dropout, lines_of
from autopar.ir.program.operators.attention.kernels import Block
from autopar.ir.program.operators.attention.tiles import attend_in_tiles, gradients_in_tiles

SAMPLES, HEADS, KEY_HEADS, FEATURES, SCALE, P = 2, 4, 2, 8, 0.4, 0.3


def explicit(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of what nothing is dropped of."""
    assert block.dropout is not None
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if block.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if block.mask_BHST is not None:
        scores = scores + block.mask_BHST
    kept = torch.ops.aten._safe_softmax(scores, -1) * ~block.dropout.dropped() / (1 - P)
    return kept @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("kind", ["full", "causal", "mask", "mask of keys"])
@pytest.mark.parametrize("size", [3, 64])
def test_tiles_add_up(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SMALLEST", size)
    monkeypatch.setattr(tiles, "SCORES", 1)
    torch.manual_seed(0)
    queries, keys = 11, 11 if kind == "causal" else 7
    heads = ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys), (HEADS, queries))
    q, k, v, grad = (torch.randn(SAMPLES, *each, FEATURES, dtype=torch.float64, requires_grad=True) for each in heads)
    mask = None
    if "mask" in kind:
        mask = torch.randn(1, 1, 1 if kind == "mask of keys" else queries, keys, dtype=torch.float64)
        mask = mask.masked_fill(mask > 1, -math.inf)
    lines = lines_of(torch.tensor(1), torch.arange(SAMPLES), torch.arange(HEADS))
    dropout = Dropout.of(P, lines, torch.arange(queries), torch.arange(keys))
    block = Block(SCALE, kind == "causal", mask, dropout)
    expected, lse = explicit(q, k, v, block)
    with torch.no_grad():
        out, found = attend_in_tiles(q, k, v, block)
        torch.testing.assert_close((out, found), (expected, lse))
        gradients = gradients_in_tiles(grad, q, k, v, out, found, block)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), grad))


def test_a_tile_has_few_scores_however_many_there_are() -> None:
    q = torch.empty(8, 16, 5000, 4, device="meta")
    dropout = Dropout(P, torch.empty(8, 16, 5000, dtype=torch.int64, device="meta"), torch.empty(5000, device="meta"))
    found = list(tiles.tiles((0, 5000), (0, 5000), Block(1.0, True, None, dropout), q))
    sizes = {(q1 - q0) * (k1 - k0) * 8 * 16 for (q0, q1), (k0, k1), _ in found}
    assert max(sizes) <= tiles.SCORES
    assert sum((q1 - q0) * (k1 - k0) for (q0, q1), (k0, k1), _ in found) < 0.51 * 5000**2, "those behind are not made"


def test_a_block_without_dropout_stays_one() -> None:
    block = Block(1.0)
    assert list(tiles.tiles((3, 900), (5, 7000), block, torch.empty(1, 1, 1, 1))) == [((3, 900), (5, 7000), block)]
