"""The operators of experts: what their gradients do with losses that do not depend on them, and with second ones."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.program.operators.derivatives import SECOND
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH

X_TD = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
INDEX_TK = torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [1, 0], [2, 1]])


def block(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
    rows, counts, _, route, splits = DISPATCH(x_TD, INDEX_TK, 3)
    return COMBINE(rows.sin(), weights_TK, route, counts, splits)


def test_first_gradients_are_those_of_the_same_sum_written_out() -> None:
    x, weights = X_TD.clone().requires_grad_(), torch.rand(6, 2, dtype=torch.float64).requires_grad_()
    found = torch.autograd.grad(block(x, weights).square().sum(), (x, weights))
    y = x.sin() * weights[:, :1] + x.sin() * weights[:, 1:]
    torch.testing.assert_close(found, torch.autograd.grad(y.square().sum(), (x, weights)))


def test_of_what_a_loss_does_not_depend_on_there_is_no_gradient() -> None:
    """A Function between gives None for what it does not derive."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> None:  # type: ignore[override]
            return None

    x, weights = nn.Parameter(X_TD), nn.Parameter(torch.ones(6, 2, dtype=torch.float64))
    Stop.apply(block(x, weights)).sum().backward()
    rows = DISPATCH(x, INDEX_TK, 3)[0]
    Stop.apply(rows).sum().backward()
    assert x.grad is None and weights.grad is None


def test_a_second_derivative_is_refused_in_words() -> None:
    x, weights = X_TD.clone().requires_grad_(), torch.ones(6, 2, dtype=torch.float64)
    (first,) = torch.autograd.grad(block(x, weights).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=re.escape(SECOND)):
        first.sum().backward()
