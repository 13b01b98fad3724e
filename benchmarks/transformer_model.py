"""A small decoder that every contestant trains: the same weights and the same global batch for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 20240613


@dataclass(frozen=True, slots=True)
class Size:
    """Layers, hidden size, heads, tokens in the vocabulary, texts in the global batch, and tokens in a text."""

    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int = 1024
    batch: int = 8
    sequence: int = 64

    def __str__(self) -> str:
        return f"{self.num_layers} layers, d={self.hidden}"


class Attention(nn.Module):
    """Causal attention; how many heads it computes follows from its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size.hidden, size.hidden) for _ in range(4))
        self.head_dim = size.hidden // size.num_heads

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    """Two projections with a GELU between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A layer with the norms before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(size.hidden), Attention(size)
        self.feedforward_norm, self.feedforward = nn.LayerNorm(size.hidden), Feedforward(size)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))


class Transformer(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Token ids and labels [batch, sequence] → mean cross-entropy."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """[batch, sequence, vocabulary], in any dtype, and [batch, sequence] → mean cross-entropy, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def transformer(size: Size) -> Transformer:
    """The same weights on every call."""
    torch.manual_seed(SEED)
    return Transformer(size)


def batch(size: Size) -> tuple[Tensor, Tensor]:
    """Ids and labels of the global batch."""
    ids = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=torch.Generator().manual_seed(SEED))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
