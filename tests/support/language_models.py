"""A language model of one attention block, small enough to be captured in a moment, and batches of texts for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, HIDDEN, HEADS = 24, 16, 2


class LanguageModel(nn.Module):
    """Embedding, attention that is causal or masked, a head over the vocabulary, and a loss over next tokens."""

    def __init__(self, causal: bool = True, dropout: float = 0.0, loss: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.packed, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.causal, self.dropout, self.loss = causal, dropout, loss

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        x_BSD = F.dropout(self.embed(input_ids), self.dropout, self.training)
        q_BHSE, k_BHSE, v_BHSE = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.packed(self.norm(x_BSD)).chunk(3, -1)
        )
        seen = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        mixed_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BHSE, v_BHSE, seen, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        x_BSD = x_BSD + self.out(mixed_BHSE.transpose(1, 2).flatten(2))
        logits_BSV = self.head(x_BSD)
        if self.loss is not None:
            return {"loss": self.loss(logits_BSV, labels), "logits": logits_BSV}
        return {"loss": F.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten()), "logits": logits_BSV}


def language_model(**options: Any) -> LanguageModel:
    """The same weights in every call."""
    torch.manual_seed(0)
    return LanguageModel(**options)


def texts(batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """So many texts, with their next tokens as labels."""
    tokens_BS = torch.randint(1, VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens_BS[:, :-1], "labels": tokens_BS[:, 1:].contiguous()}
