"""A small model of gated MLPs, which can be taken in tiles."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Gated(nn.Module):
    """Two blocks of a gated MLP over tokens, and a loss."""

    def __init__(self, size: int = 8, hidden: int = 16, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict(_linears(size, hidden, bias)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h_BSK = F.silu(layer["gate"](x)) * layer["up"](x)  # type: ignore[index]
            x = x + layer["down"](h_BSK)  # type: ignore[index]
        return x.square().mean()


def _linears(size: int, hidden: int, bias: bool) -> dict[str, nn.Module]:
    gate, up = (nn.Linear(size, hidden, bias=bias) for _ in range(2))
    return {"gate": gate, "up": up, "down": nn.Linear(hidden, size, bias=bias)}


def tokens(seed: int = 0, batch: int = 4, sequence: int = 8, size: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(batch, sequence, size, generator=generator, dtype=torch.float64)}
