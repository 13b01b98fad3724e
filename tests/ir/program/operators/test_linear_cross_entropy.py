"""A linear layer with its cross-entropy in tiles: as PyTorch's own two calls, and without all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY, MEAN, SUM, rows_of_tiles
from autopar.tools.benchmarking.meters import LiveBytes

REDUCTIONS = {MEAN: "mean", SUM: "sum"}


def tensors(dtype: torch.dtype = torch.float64, rows: tuple[int, ...] = (2, 7)) -> list[Tensor]:
    """Hidden states, weight, bias and targets, one of them ignored."""
    torch.manual_seed(0)
    shapes = ((*rows, 8), (11, 8), (11,))
    target = torch.randint(11, rows)
    target[..., 0] = -100
    return [*(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes), target]


def whole(
    hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, reduction: int, ignored: int, dtype: torch.dtype
) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2).to(dtype)
    return F.cross_entropy(logits, target.flatten(), reduction=REDUCTIONS[reduction], ignore_index=ignored)


def with_gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(3 * loss, [x for x in inputs if x.requires_grad])]


@pytest.mark.parametrize("tiles", [0, 1, 3, 99])
@pytest.mark.parametrize(("reduction", "ignored"), [(MEAN, -100), (SUM, -100), (MEAN, 4)])
def test_it_is_a_linear_layer_and_its_loss(tiles: int, reduction: int, ignored: int) -> None:
    *inputs, target = tensors()
    given: Any = *inputs, target if ignored < 0 else target.clamp(min=0), reduction, ignored, torch.float64
    expected = with_gradients(whole(*given), inputs)
    torch.testing.assert_close(with_gradients(LINEAR_CROSS_ENTROPY(*given, tiles), inputs), expected)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 2), (1, 2)])
def test_what_is_frozen_has_no_gradient(frozen: tuple[int, ...]) -> None:
    *inputs, target = tensors()
    inputs = [x.detach() if number in frozen else x for number, x in enumerate(inputs)]
    given: Any = *inputs, target, MEAN, -100, torch.float64
    expected = with_gradients(whole(*given), inputs)
    torch.testing.assert_close(with_gradients(LINEAR_CROSS_ENTROPY(*given, 4), inputs), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_no_worse_than_in_one_piece(dtype: torch.dtype) -> None:
    *exact, target = tensors(rows=(64, 32))
    given: Any = *exact, target, SUM, -100, torch.float64
    precise = with_gradients(whole(*given), exact)
    inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
    given = *inputs, target, SUM, -100, torch.float32

    def errors(found: list[Tensor]) -> list[float]:
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, precise, strict=True)]

    ours, theirs = (errors(with_gradients(loss, inputs)) for loss in (LINEAR_CROSS_ENTROPY(*given, 16), whole(*given)))
    assert all(one <= 1.1 * other + 1e-6 for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_a_mean_of_ignored_rows_alone_is_no_number_and_has_no_gradient() -> None:
    *inputs, target = tensors()
    loss = LINEAR_CROSS_ENTROPY(*inputs, torch.full_like(target, -100), MEAN, -100, torch.float64, 2)
    assert loss.isnan()
    assert not any(g.any() for g in torch.autograd.grad(loss, inputs))


def test_a_class_that_is_not_there_is_an_error() -> None:
    *inputs, target = tensors()
    with pytest.raises(RuntimeError, match="index 11 is out of bounds"):
        LINEAR_CROSS_ENTROPY(*inputs, target.clamp(min=11), MEAN, -100, torch.float64, 2)


def test_its_backward_may_run_twice_and_has_no_derivative() -> None:
    *inputs, target = tensors()
    loss = LINEAR_CROSS_ENTROPY(*inputs, target, MEAN, -100, torch.float64, 2)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs, retain_graph=True), first)
    again = torch.autograd.grad(loss, inputs, torch.ones_like(loss).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="a derivative of a derivative"):
        again[0].sum().backward()


def test_tiles_have_as_many_rows_and_none_is_empty() -> None:
    for num_rows in range(1, 20):
        for tiles in range(1, 25):
            found = rows_of_tiles(num_rows, tiles)
            assert sum(found) == num_rows and len(found) <= tiles and min(found) > 0
            assert set(found[:-1]) <= {found[0]} and found[-1] <= found[0]


@pytest.mark.parametrize(("dtype", "bytes_of_logits"), [(torch.float32, 4), (torch.bfloat16, 2 + 4)])
def test_a_tile_is_all_that_there_is_of_logits(dtype: torch.dtype, bytes_of_logits: int) -> None:
    rows, features, classes, tiles = 256, 8, 1024, 8
    hidden, weight = torch.randn(rows, features, dtype=dtype), torch.randn(classes, features, dtype=dtype)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    target = torch.randint(classes, (rows,))

    def peak(function: Any, *further: Any) -> int:
        live = LiveBytes([*inputs, target])
        before = live.look()
        with live:
            function(*inputs, None, target, MEAN, -100, torch.float32, *further).backward()
        hidden.grad = weight.grad = None
        return live.highest - before

    in_one_piece, in_tiles = peak(whole), peak(LINEAR_CROSS_ENTROPY, tiles)
    kept = rows * features * dtype.itemsize + classes * features * 4
    assert in_tiles < kept + 1.1 * bytes_of_logits * rows * classes / tiles
    assert in_tiles < in_one_piece / 6
