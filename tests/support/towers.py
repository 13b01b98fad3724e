"""Residual blocks one after the other: a model whose layers keep much for their backward, and none of it for others."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual connection around an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(nn.functional.gelu(self.up(self.norm(x_BD))))


def tower(depth: int = 6, width: int = 32, device: str = "cpu") -> nn.Module:
    """So many blocks, equal on every build."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return nn.Sequential(*(Block(width) for _ in range(depth)))
