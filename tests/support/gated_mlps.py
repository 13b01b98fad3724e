"""A small model of gated MLPs, which can be taken in tiles."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A gated MLP with a residual connection."""

    def __init__(self, size: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    """Two blocks of a gated MLP over tokens, and a loss."""

    def __init__(self, size: int = 8, hidden: int = 16, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(size, hidden, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tokens(seed: int = 0, batch: int = 4, sequence: int = 8, size: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(batch, sequence, size, generator=generator, dtype=torch.float64)}
