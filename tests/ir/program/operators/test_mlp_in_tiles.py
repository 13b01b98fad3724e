"""An MLP in tiles: as PyTorch's own calls, and with no hidden activation that is kept, or there all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.program.operators.mlp_in_tiles import ACTIVATIONS, MLP_IN_TILES
from autopar.tools.benchmarking.meters import LiveBytes

FORMS = {
    "gated": (False, True),
    "gated with biases": (True, True),
    "plain": (False, False),
    "plain with biases": (True, False),
}
"""Form of an MLP → (has biases, has a gate)."""


def tensors(
    biases: bool, gated: bool, dtype: torch.dtype = torch.float64, rows: tuple[int, ...] = (2, 7), hidden: int = 12
) -> list[Tensor | None]:
    """x, then weights and biases as the operator takes them."""
    torch.manual_seed(0)
    gate = ((hidden, 8), (hidden,)) if gated else (None, None)
    shapes = [(*rows, 8), (hidden, 8), (hidden,), *gate, (8, hidden), (8,)]
    if not biases:
        shapes[2::2] = [None] * 3
    return [None if each is None else torch.randn(each, dtype=dtype).requires_grad_() for each in shapes]


def whole(
    x: Tensor, up: Tensor, up_bias: Any, gate: Any, gate_bias: Any, down: Tensor, down_bias: Any, activation: str
) -> Tensor:
    function, hidden = ACTIVATIONS[activation].of, F.linear(x, up, up_bias)
    hidden = function(hidden) if gate is None else function(F.linear(x, gate, gate_bias)) * hidden
    return F.linear(hidden, down, down_bias)


def with_gradients(y: Tensor, inputs: list[Any]) -> list[Tensor]:
    learned = [x for x in inputs if x is not None and x.requires_grad]
    grad = torch.arange(y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, learned, grad)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", [1, 3, 99])
def test_it_is_two_linear_layers_and_what_lies_between(form: str, tiles: int) -> None:
    inputs = tensors(*FORMS[form])
    for activation in ACTIVATIONS:
        expected = with_gradients(whole(*inputs, activation), inputs)  # type: ignore[arg-type]
        found = with_gradients(MLP_IN_TILES(*inputs, activation, tiles), inputs)
        torch.testing.assert_close(found, expected, msg=lambda text, name=activation: f"{name}: {text}")


@pytest.mark.parametrize("frozen", [(0,), (1,), (5,), (0, 3, 5), (1, 3), (0, 1, 2, 3, 4)])
def test_what_is_frozen_has_no_gradient(frozen: tuple[int, ...]) -> None:
    inputs = [x.detach() if i in frozen else x for i, x in enumerate(tensors(True, True)) if x is not None]
    expected = with_gradients(whole(*inputs, "silu"), inputs)  # type: ignore[arg-type]
    torch.testing.assert_close(with_gradients(MLP_IN_TILES(*inputs, "silu", 4), inputs), expected)


def test_no_rows_make_no_rows_and_gradients_of_zero() -> None:
    inputs = tensors(False, True, rows=(0, 7))
    y = MLP_IN_TILES(*inputs, "silu", 4)
    assert y.shape == (0, 7, 8)
    assert not any(grad.any() for grad in with_gradients(y, inputs)[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_as_in_one_piece_however_many_tiles_there_are(dtype: torch.dtype) -> None:
    exact = tensors(True, True, rows=(64, 32))
    precise = with_gradients(whole(*exact, "silu"), exact)  # type: ignore[arg-type]
    inputs = [None if x is None else x.detach().to(dtype).requires_grad_() for x in exact]

    def errors(found: list[Tensor]) -> list[float]:
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, precise, strict=True)]

    ours = errors(with_gradients(MLP_IN_TILES(*inputs, "silu", 512), inputs))
    theirs = errors(with_gradients(whole(*inputs, "silu"), inputs))  # type: ignore[arg-type]
    assert all(one <= 1.3 * other + 1e-6 for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_its_backward_may_run_twice_and_has_no_derivative() -> None:
    inputs = [x for x in tensors(True, True) if x is not None]
    y = MLP_IN_TILES(*inputs, "silu", 2).sum()
    first = torch.autograd.grad(y, inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, retain_graph=True), first)
    again = torch.autograd.grad(y, inputs, torch.ones_like(y).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="a derivative of a derivative"):
        again[0].sum().backward()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_is_all_that_there_is_of_hidden_activations(gated: bool, dtype: torch.dtype) -> None:
    rows, hidden, tiles = 512, 256, 8
    inputs = tensors(False, gated, dtype, (rows,), hidden)
    given = [x for x in inputs if x is not None]

    def peak(function: Any, *further: Any) -> int:
        live = LiveBytes(given)
        before = live.look()
        with live:
            function(*inputs, "silu", *further).backward(torch.ones(rows, 8, dtype=dtype))
        for x in given:
            x.grad = None
        return live.highest - before

    in_one_piece, in_tiles = peak(whole), peak(MLP_IN_TILES, tiles)
    of_a_tile, of_weights = (3 + gated) * rows * hidden // tiles * dtype.itemsize, 3 * hidden * 8 * 8
    assert in_tiles < 1.1 * of_a_tile + of_weights + 4 * rows * 8 * 4
    assert in_tiles < in_one_piece / 3
