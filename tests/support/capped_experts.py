"""Experts with a capacity as a loop over samples, positions and slots counts them: what `capacity_factor=` must equal.

Legend: B samples, S positions, T = B · S tokens, K experts of a token, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.divided_experts import SortedExperts, WithExperts


def within(index_TK: Tensor, num_samples: int, limit: int) -> Tensor:
    """Return, for each slot, whether its expert has taken fewer than `limit` rows of the sample before it."""
    found = torch.zeros_like(index_TK, dtype=torch.bool)
    length = index_TK.shape[0] // num_samples
    for sample in range(num_samples):
        taken: dict[int, int] = {}
        for token in range(sample * length, (sample + 1) * length):
            for slot, expert in enumerate(index_TK[token].tolist()):
                found[token, slot] = taken.get(expert, 0) < limit
                taken[expert] = taken.get(expert, 0) + 1
    return found


class CappedExperts(SortedExperts):
    """The same experts, all of a token's at once, without those that are full."""

    limit = 0

    def forward(self, h_BSD: Tensor) -> Tensor:
        form, x_TD = self.form, h_BSD.flatten(0, 1)
        weights_TK, index_TK = self.router(x_TD).softmax(-1).topk(form.top_k)
        weights_TK = weights_TK + weights_TK / (1 + weights_TK.sum(-1, keepdim=True))
        weights_TK1 = weights_TK.unsqueeze(-1)
        rows_TKD = x_TD.unsqueeze(1).expand(-1, form.top_k, -1)
        if form.early:
            rows_TKD = rows_TKD * weights_TK1
        up = torch.einsum("tkd,tkfd->tkf", rows_TKD, self.w1[index_TK])
        gate, up = (up if self.b1 is None else up + self.b1[index_TK]).chunk(2, -1)
        down = torch.einsum("tkf,tkdf->tkd", F.silu(gate) * up, self.w2[index_TK])
        down = down if self.b2 is None else down + self.b2[index_TK]
        if not form.early:
            down = down * weights_TK1
        kept_TK1 = within(index_TK, h_BSD.shape[0], self.limit).unsqueeze(-1)
        return torch.where(kept_TK1, down, 0).sum(1).view(h_BSD.shape)


def capped(model: WithExperts, limit: int) -> WithExperts:
    """A model whose experts take at most so many rows of each sample."""
    for module in model.modules():
        if isinstance(module, SortedExperts):
            module.__class__ = CappedExperts
            module.limit = limit  # type: ignore[assignment]
    return model


def capped_family(model: nn.Module, num_samples: int, limit: int) -> nn.Module:
    """The same of a model of transformers, whose experts weigh a row that is dropped by 0."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            plain = module.forward

            def forward(x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, plain: Any = plain) -> Tensor:
                return plain(x_TD, index_TK, weights_TK * within(index_TK, num_samples, limit))

            module.forward = forward
    return model
