"""Rows of tokens for their experts, however the experts of tokens lie in memory."""

from __future__ import annotations

import torch

from autopar.ir.program.operators.expert_operators import some_rows


def test_experts_of_tokens_may_lie_in_memory_in_another_order() -> None:
    x_BSD, index_SBK = torch.randn(2, 3, 4), torch.randint(4, (3, 2, 2))
    turned_BSK = index_SBK.transpose(0, 1)
    kept = turned_BSK % 2 == 0
    found = some_rows(x_BSD, turned_BSK, 4, kept, kept.sum().item())
    expected = some_rows(x_BSD, turned_BSK.contiguous(), 4, kept.contiguous(), kept.sum().item())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
