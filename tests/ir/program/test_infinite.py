"""Infinite values are followed through a program, and partial values, which may be zeros, are kept from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.costs.space.space import Space
from autopar.errors import AnnotationError
from autopar.ir.program.infinite import may_be_infinite
from autopar.ir.sharding.layout import P
from autopar.planning.annotations.annotate import annotate, annotations_of, pins_of
from tests.support.planned import space_of


class Scaled(nn.Module):
    """A product of a hidden tensor with what `factor` makes of a parameter's shape."""

    def __init__(self, factor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.factor = factor

    def forward(self, x_BD: Tensor) -> Tensor:
        hidden_BD = self.up(x_BD)
        return (hidden_BD * self.factor(hidden_BD.detach())).sum()


X_BD = torch.ones(4, 8)
MASK_D = torch.tensor([0.0, -torch.inf]).repeat(4)
FACTORS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a constant of -inf": (lambda h: MASK_D.clone(), True),
    "a constant of numbers": (lambda h: torch.arange(8.0), False),
    "filled": (lambda h: h.masked_fill(h > 0, -torch.inf), True),
    "filled with zeros": (lambda h: h.masked_fill(h > 0, 0.0), False),
    "full, turned round and cut": (lambda h: torch.full((8, 8), torch.inf).tril().t()[0], True),
    "chosen": (lambda h: torch.where(h > 0, MASK_D, 0.0), True),
    "after softmax": (lambda h: h.masked_fill(h > 0, -torch.inf).softmax(-1), False),
    "after exp": (lambda h: h.masked_fill(h > 0, -torch.inf).exp(), False),
}


def partial_products(space: Space) -> list[bool]:
    """Return, for every strategy of the product, whether its hidden factor is partial."""
    (decision,) = (each for each in space.decisions if each.name.startswith("mul"))
    return [strategy.inputs[0][0] is P for strategy in decision.candidates.strategies]


@pytest.mark.parametrize("name", FACTORS)
def test_partial_values_are_not_multiplied_with_infinite_ones(name: str) -> None:
    factor, infinite = FACTORS[name]
    assert any(partial_products(space_of(Scaled(factor), (X_BD,)))) != infinite


class OfInputs(nn.Module):
    """A weight by an input, which may hold a mask; in between there may be a function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.function = function

    def forward(self, x_BD: Tensor) -> Tensor:
        return (self.weight * self.function(x_BD)).exp().sum()


def test_inputs_may_be_infinite_and_what_bounds_them_is_not() -> None:
    assert "x_bd" in may_be_infinite(capture(OfInputs(), (X_BD,), {}))
    assert not any(partial_products(space_of(OfInputs(), (X_BD,))))
    assert any(partial_products(space_of(OfInputs(torch.tanh), (X_BD,))))


def test_a_pin_that_asks_for_such_a_product_is_refused() -> None:
    model = OfInputs()
    annotate(model, "%mul_tensor", tp="factor:P0")
    with pytest.raises(AnnotationError, match=r'"factor:P0"\): the rule of mul_tensor .* which offers "factor:b"'):
        pins_of(annotations_of(model), space_of(model, (X_BD,)), "semi_auto", {})
