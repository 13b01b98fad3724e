"""Families that return their loss and no logits, so that it can be taken in tiles."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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
