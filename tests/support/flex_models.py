"""Language models that attend by `flex_attention`, and the same written out, as no CPU differentiates the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SEED, BATCH, POSITIONS, HEADS, KEY_HEADS, WIDTH, VOCABULARY = 3, 4, 32, 4, 2, 4, 24
HIDDEN = HEADS * WIDTH
WINDOW = 9
compiled = torch.compile(flex_attention)


def documents(batch: int, seed: int) -> Tensor:
    """Return the document of each position."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, POSITIONS, generator=generator) < 0.2).cumsum(1)


class Attention(nn.Module):
    """Grouped heads with the mask and the score function of a kind; `dense` writes all scores out."""

    slopes: Tensor

    def __init__(self, kind: str, dense: bool) -> None:
        super().__init__()
        self.kind, self.dense = kind, dense
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key, self.value = (nn.Linear(HIDDEN, KEY_HEADS * WIDTH) for _ in range(2))
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))
        self.table = nn.Parameter(torch.randn(HEADS, 2 * POSITIONS))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        made = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        q, k, v = made
        mask, score = self.functions(documents)
        if self.dense:
            y = written_out(q, k, v, mask, score)
        else:
            blocks = mask and create_block_mask(mask, x.shape[0], None, POSITIONS, POSITIONS, device=x.device)
            y = compiled(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def functions(self, documents: Tensor) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]:
        """Return the mask_mod and the score_mod, which work for single indices as for vectors of them."""

        def causal(b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return q >= k

        def packed(b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k]) & (q - k < WINDOW)

        def first_heads(b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return (q >= k) & ((h < 1) | (q - k < WINDOW))

        def nearer(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return s + self.slopes[h] * (k - q)

        def capped(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return 2.0 * torch.tanh(s / 2.0)

        def both(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return nearer(capped(s, b, h, q, k), b, h, q, k)

        def learned(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return s + self.table[h, q - k + POSITIONS]

        def scored(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return torch.where(q >= k, s, -float("inf"))

        return {
            "causal": (causal, None),
            "documents": (packed, None),
            "by heads": (first_heads, None),
            "alibi": (causal, nearer),
            "softcap": (packed, capped),
            "both": (packed, both),
            "learned": (causal, learned),
            "score alone": (None, scored),
        }[self.kind]


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any) -> Tensor:
    """Return attention by all scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    sizes = *q.shape[:3], k.shape[2]
    at = [torch.arange(size).view(-1, *(1,) * (3 - dim)) for dim, size in enumerate(sizes)]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if score is not None:
        scores = score(scores, *at)
    if mask is not None:
        scores = scores.masked_fill(~mask(*at), -math.inf)
    return scores.softmax(-1) @ v


class Model(nn.Module):
    """Two layers of attention between an embedding and a loss."""

    def __init__(self, kind: str, dense: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Attention(kind, dense) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, documents)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def build(kind: str, dense: bool = False) -> Model:
    """Return a model, with the same values on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Model(kind, dense)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the ids and documents of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, POSITIONS), generator=generator), documents(BATCH, step)
