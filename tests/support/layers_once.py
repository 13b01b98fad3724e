"""Stacks of layers, and the check that tracing equal ones once gives the program of tracing each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.capture.layers import once
from autopar.ir.program.program import Program
from tests.support.eager import assert_as_eager

NUMBER, WIDTH = 4, 8


class Layer(nn.Module):
    """A residual MLP with all that the tests below change about it."""

    calls = 0
    seen: Tensor
    extra: int

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.scale = 0.5
        self.sizes = [1, 2]
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.activation: Callable[[Tensor], Tensor] = F.gelu
        self.owner: list[nn.ModuleList] = []
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Any, *args: Any) -> Any:
        gain, factor = args if args else (None, 1.0)
        for size in self.sizes:
            x = x + size
        moved = x + self.scale * self.down(self.activation(self.up(self.norm(x))))
        return moved * factor if gain is None else moved * gain


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind(index) for index in range(NUMBER))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def each(self) -> list[Layer]:
        """Its layers."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def stack(kind: type[Layer] = Layer) -> Stack:
    torch.manual_seed(0)
    return Stack(kind)


def example() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@contextlib.contextmanager
def counted() -> Iterator[list[nn.Module]]:
    """The layers that are not traced, inside."""
    repeated: list[nn.Module] = []
    original = once.EqualLayers._repeated

    def count(self: Any, template: Any, *args: Any) -> Any:
        repeated.append(template.layer)
        return original(self, template, *args)

    with mock.patch.object(once.EqualLayers, "_repeated", count):
        yield repeated


def one_by_one(model: nn.Module, *args: Any) -> Program:
    """The program of a model whose every layer is traced."""
    with mock.patch.object(once, "FEWEST", 10**9):
        return capture(model, args, {})


def check(model: nn.Module, repeated: int, *args: Any) -> Program:
    """The model trains as eager, its program is that of tracing each layer, and so many layers were not traced."""
    args = args or (example(),)
    with counted() as found:
        program = assert_as_eager(model, args, tolerance=1e-4)
    assert len(found) == repeated
    expected = one_by_one(model, *args)
    assert list(program.lines()) == list(expected.lines())
    for ours, theirs in zip(program.graph.nodes, expected.graph.nodes, strict=True):
        assert (ours.name, ours.meta.get("module")) == (theirs.name, theirs.meta.get("module"))
    assert sorted(place.name for place in program.python.read) == sorted(x.name for x in expected.python.read)
    return program
