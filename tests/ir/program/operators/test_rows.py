"""The cross-entropy of rows with several dims is that of a list of them."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_rows_of_two_dims_are_a_list(reduction: int) -> None:
    torch.manual_seed(0)
    logits_BSV, weight_V = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.rand(5).double()
    target_BS = torch.tensor([[0, -100, 4], [-100, 2, 1]])
    flat = torch.ops.aten.cross_entropy_loss(logits_BSV.view(6, 5), target_BS.view(6), weight_V, reduction, -100, 0.1)
    found = CROSS_ENTROPY(logits_BSV, target_BS, weight_V, reduction, -100, 0.1)
    assert found.shape == ((2, 3) if reduction == 0 else ())
    torch.testing.assert_close(found.flatten(), flat.flatten())
    grads = [torch.autograd.grad(loss.sum(), logits_BSV) for loss in (found, flat)]
    torch.testing.assert_close(*grads)
