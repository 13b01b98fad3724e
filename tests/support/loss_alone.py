"""Models that return their loss and no logits, so that it can be taken in tiles: families, and a small one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.families import FAMILIES, Family


class LossAlone(nn.Module):
    """A model of transformers whose forward returns the loss of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


def _of(family: str) -> Family:
    def build(**options: Any) -> nn.Module:
        return LossAlone(FAMILIES[family].build(**options))

    return Family(f"{family}_loss", build, FAMILIES[family].inputs, lambda loss: loss)


LOSS_ALONE = {found.name: found for found in map(_of, ("gpt2", "llama", "bert"))}


def flattened(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Reader(nn.Module):
    """Embedded tokens through one block, a head, and a loss of its logits."""

    def __init__(
        self,
        num_classes: int = 24,
        size: int = 8,
        tied: bool = False,
        bias: bool = False,
        loss: Callable[[Tensor, Tensor], Any] = flattened,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_classes, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.head = nn.Linear(size, num_classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x_BSD = self.embed(ids)
        return self.loss(self.head(x_BSD + self.down(F.gelu(self.up(x_BSD)))), labels)


def reading(seed: int = 0, batch: int = 4, sequence: int = 8, num_classes: int = 24) -> dict[str, Tensor]:
    """A batch for it, of whose labels some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(num_classes, (batch, sequence), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}
