"""Buffers that a forward assigns hold the same after a captured call as after an eager one, wherever they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.errors import CaptureError
from tests.support.eager import assert_as_eager


class Inner(nn.Module):
    """Does something with its buffers, and multiplies by one of them as it was and is."""

    steps: Tensor
    other: Tensor | None

    def __init__(self, change: Callable[[Inner], None]) -> None:
        super().__init__()
        self.change = change
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor([2.0]))
        self.register_buffer("other", torch.tensor([3.0]))

    def forward(self, x: Tensor) -> Tensor:
        before = self.steps
        self.change(self)
        return self.linear(x) * self.steps * before


class Outer(nn.Module):
    def __init__(self, change: Callable[[Inner], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner(change) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _count(inner: Inner) -> None:
    inner.steps = inner.steps + 1


def _count_twice(inner: Inner) -> None:
    _count(inner)
    _count(inner)


def _swap(inner: Inner) -> None:
    assert inner.other is not None
    inner.steps, inner.other = inner.other, inner.steps


def _average(inner: Inner) -> None:
    assert inner.other is not None
    inner.other = 0.9 * inner.other + 0.1 * inner.linear.weight.sum().reshape(1)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_count, ("steps",)),
        (_count_twice, ("steps",)),
        (_swap, ("steps", "other")),
        (_average, ("other",)),
    ],
)
def test_buffers_of_inner_modules_are_written(change: Callable[[Inner], None], names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    program = assert_as_eager(Outer(change), (torch.randn(2, 4),))
    assert set(program.mutations) == {f"layers.{index}.{name}" for index in range(2) for name in names}


def _widen(inner: Inner) -> None:
    inner.steps = torch.zeros(4)


def _cast(inner: Inner) -> None:
    inner.steps = inner.steps.double()


def _drop(inner: Inner) -> None:
    inner.other = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _widen,
            r"assigns torch.float32 of shape \[4\] to the buffer layers.0.steps.*float32 of shape \[1\].*same shape",
        ),
        (_cast, r"assigns torch.float64 of shape \[1\] to the buffer layers.0.steps"),
        (_drop, "assigns None to the buffer layers.0.other"),
    ],
)
def test_what_a_buffer_cannot_hold_is_refused(change: Callable[[Inner], None], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Outer(change), (torch.randn(2, 4),), {})
