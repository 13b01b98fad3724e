"""A dropout keeps the seed of its mask alone, and drops the same in the backward, whatever has been drawn since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.implementations import dropout as dropouts
from autopar.runtime.implementations.dropout import dropout
from autopar.runtime.implementations.randomness import use_randomness

SIZES = {"a": 64, "b": 32}


def two(x: Tensor) -> Tensor:
    """One dropout behind the other."""
    x = dropout(x, 0.3, True, key=0, axes={}, sizes=SIZES)
    return dropout(x, 0.5, True, key=1, axes={}, sizes=SIZES)


def drawn(call: Callable[[Tensor], Tensor], step: int, deterministic: bool = False) -> tuple[list[Tensor], list[Any]]:
    """Return the factors that a step multiplies by, forward and backward, and the tensors that autograd saves.

    A later step runs between forward and backward.
    """
    torch.manual_seed(step)
    x, kept = torch.ones(64, 32, requires_grad=True), []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved), use_randomness(5, step, deterministic):
        y = call(x)
    with use_randomness(5, step + 7, deterministic):
        call(x.detach())
        (grad,) = torch.autograd.grad(y.sum(), x)
    return [y.detach(), grad], kept


def test_forward_and_backward_drop_the_same_and_nothing_is_kept() -> None:
    (y, grad), kept = drawn(two, 0)
    assert torch.equal(y, grad) and kept == []
    assert abs(float((y == 0).double().mean()) - 0.65) < 6 * (0.65 * 0.35 / y.numel()) ** 0.5
    assert not torch.equal(y, drawn(two, 1)[0][0])


def test_the_deterministic_mode_keeps_a_byte_for_each_element() -> None:
    (y, grad), kept = drawn(two, 0, deterministic=True)
    assert torch.equal(y, grad)
    assert [x.dtype for x in kept] == [torch.bool] * 2


def test_a_dropout_has_a_second_derivative() -> None:
    x = torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: two(x).sigmoid(), x, fast_mode=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_it_drops_what_it_drops_otherwise(backend: str) -> None:
    compiled: Any = torch.compile(two, backend=backend, fullgraph=True)
    for step in (0, 1, 0):
        (y, grad), kept = drawn(compiled, step)
        assert torch.equal(y, grad) and torch.equal(y, drawn(two, step)[0][0])
        assert sum(x.nbytes for x in kept) <= 2 * y.numel(), "at most a byte for each element"


def test_all_draws_of_a_device_share_one_generator() -> None:
    dropouts._generator.cache_clear()
    drawn(two, 0)
    assert dropouts._generator.cache_info().currsize == 1
