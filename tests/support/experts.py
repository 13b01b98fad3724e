"""Mixture-of-Experts as people write it. Legend: B samples, S positions, D features, T = B · S tokens.

K experts of a token, of E; R = T · K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  which defines the grouped product for any dtype
from torch import Tensor, nn
from torch.nn import functional as F

grouped = torch.ops.transformers.grouped_mm_fallback


def histogram(flat_R: Tensor, num_experts: int) -> Tensor:
    return torch.histc(flat_R.float(), num_experts, 0, num_experts - 1)


def one_hot(flat_R: Tensor, num_experts: int) -> Tensor:
    return F.one_hot(flat_R, num_experts).sum(0)


def binned(flat_R: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(flat_R, minlength=num_experts)


def scattered(flat_R: Tensor, num_experts: int) -> Tensor:
    return torch.zeros(num_experts, dtype=torch.int64).scatter_add(0, flat_R, torch.ones_like(flat_R))


def added(y_RD: Tensor, token_R: Tensor, perm_R: Tensor, x_TD: Tensor, top_k: int) -> Tensor:
    return torch.zeros_like(x_TD).index_add(0, token_R, y_RD)


def scatter_added(y_RD: Tensor, token_R: Tensor, perm_R: Tensor, x_TD: Tensor, top_k: int) -> Tensor:
    return torch.zeros_like(x_TD).scatter_add(0, token_R.unsqueeze(-1).expand(-1, x_TD.shape[1]), y_RD)


def accumulated(y_RD: Tensor, token_R: Tensor, perm_R: Tensor, x_TD: Tensor, top_k: int) -> Tensor:
    return x_TD.index_put((token_R,), y_RD, accumulate=True)  # added to what is there


def inverted(y_RD: Tensor, token_R: Tensor, perm_R: Tensor, x_TD: Tensor, top_k: int) -> Tensor:
    return y_RD[torch.argsort(perm_R)].view(-1, top_k, y_RD.shape[-1]).sum(1)


def placed(y_RD: Tensor, token_R: Tensor, perm_R: Tensor, x_TD: Tensor, top_k: int) -> Tensor:
    inverse_R = torch.empty_like(perm_R)
    inverse_R[perm_R] = torch.arange(perm_R.numel())
    return y_RD[inverse_R].view(-1, top_k, y_RD.shape[-1]).sum(1)


Through = Callable[[Tensor, Callable[[Tensor, Tensor], Tensor], Tensor], Tensor]
"""Rows, a product of rows with a matrix of each expert, and the expert of each row → rows."""


def sorted_rows(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    num_experts: int,
    through: Through,
    *,
    counting: Callable[..., Tensor] = histogram,
    ending: Callable[..., Tensor] = added,
    weighted: str = "after",
) -> Tensor:
    """A block of dropless experts behind its router: `counting` and `ending` are two of the functions above."""
    top_k = expert_TK.shape[-1]
    ids_R, perm_R = torch.sort(expert_TK.reshape(-1), stable=True)
    token_R, weight_R1 = perm_R // top_k, weight_TK.reshape(-1)[perm_R].unsqueeze(-1)
    ends_E = counting(expert_TK.reshape(-1), num_experts).cumsum(0, dtype=torch.int32)
    rows_RD = x_TD[token_R]
    if weighted == "before":
        rows_RD = rows_RD * weight_R1
    y_RD = through(rows_RD, lambda rows, weight: grouped(rows, weight, ends_E), ids_R)
    if weighted == "after":
        y_RD = y_RD * weight_R1
    return ending(y_RD, token_R, perm_R, x_TD, top_k)


class SortedExperts(nn.Module):
    """A block of dropless experts: `counting` and `ending` are two of the functions above."""

    def __init__(
        self,
        counting: Callable[..., Tensor] = histogram,
        ending: Callable[..., Tensor] = added,
        weighted: str = "after",
        top_k: int = 2,
        bias: bool = False,
        num_experts: int = 4,
        sizes: tuple[int, int] = (8, 6),
    ) -> None:
        super().__init__()
        features, inner = sizes
        generator = torch.Generator().manual_seed(5)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.3 * torch.randn(*shape, generator=generator))

        self.counting, self.ending, self.weighted, self.top_k = counting, ending, weighted, top_k
        self.num_experts = num_experts
        self.router = parameter(num_experts, features)
        self.gate_up = parameter(num_experts, 2 * inner, features)
        self.down = parameter(num_experts, inner, features)
        self.bias = parameter(num_experts, 2 * inner) if bias else None

    def forward(self, h_BSD: Tensor) -> Tensor:
        x_TD = h_BSD.view(-1, h_BSD.shape[-1])
        weight_TK, expert_TK = F.linear(x_TD, self.router).softmax(-1).topk(self.top_k)
        forms: dict[str, Any] = {"counting": self.counting, "ending": self.ending, "weighted": self.weighted}
        return sorted_rows(x_TD, weight_TK, expert_TK, self.num_experts, self._through, **forms).view(h_BSD.shape)

    def _through(self, rows_RD: Tensor, product: Callable[..., Tensor], ids_R: Tensor) -> Tensor:
        up = product(rows_RD, self.gate_up.transpose(1, 2))
        gate, up = (up if self.bias is None else up + self.bias[ids_R]).chunk(2, -1)
        return product(F.silu(gate) * up, self.down)


class RepeatedTokens(SortedExperts):
    """Tokens once for each of their experts from the start, and weights after rows are back, as DeepSeek's own code."""

    def forward(self, h_BSD: Tensor) -> Tensor:
        x_TD, top_k = h_BSD.view(-1, h_BSD.shape[-1]), self.top_k
        weight_TK, expert_TK = F.linear(x_TD, self.router).softmax(-1).topk(top_k)
        perm_R = expert_TK.view(-1).argsort(stable=True)
        ends_E = self.counting(expert_TK.view(-1), self.num_experts).cumsum(0, dtype=torch.int32)
        y = grouped(x_TD.repeat_interleave(top_k, dim=0)[perm_R], self.gate_up.transpose(1, 2), ends_E)
        gate, up = y.chunk(2, -1)
        y_RD = grouped(F.silu(gate) * up, self.down, ends_E)[torch.argsort(perm_R)]
        return (y_RD.view(-1, top_k, x_TD.shape[-1]) * weight_TK.unsqueeze(-1)).sum(1).view(h_BSD.shape)


class WithExperts(nn.Module):
    """A model around a block: x (B, S, D), labels (B, S) → loss."""

    def __init__(self, features: int = 8, classes: int = 3, **block: Any) -> None:
        super().__init__()
        self.before = nn.Linear(features, features)
        self.experts = SortedExperts(**block)
        self.after = nn.Linear(features, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h_BSD = self.before(x)
        logits = self.after(h_BSD + self.experts(h_BSD))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
