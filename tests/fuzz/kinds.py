"""Kinds of expressions, and what an expression is drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from tests.fuzz.program import Shape


class UnfitError(Exception):
    """There is no operand of the kind that an expression needs."""


class Operands(Protocol):
    """Operands from which an expression is drawn."""

    random: random.Random

    def value(self, *ndims: int) -> str:
        """The name of a value, of one of these numbers of dims if any are given."""
        ...

    def weight(self, *shape: int) -> str:
        """The name of a parameter of this shape, new or one that there is."""
        ...

    def buffer(self, *shape: int) -> str:
        """The name of a new buffer."""
        ...

    def ids(self, *shape: int) -> str:
        """The name of an input of token ids."""
        ...

    def shape(self, name: str) -> Shape:
        """The shape of a value."""
        ...


Expression = Callable[[Operands], str]
EXPRESSIONS: dict[str, tuple[Expression, ...]] = {}
"""Kind → its expressions; a kind is drawn first."""


def kind(name: str) -> Callable[[Expression], Expression]:
    """Add an expression to a kind."""

    def add(expression: Expression) -> Expression:
        EXPRESSIONS[name] = (*EXPRESSIONS.get(name, ()), expression)
        return expression

    return add


def dim(d: Operands, x: str) -> int:
    """A dim of a value, counted from either end."""
    ndim = len(d.shape(x))
    if not ndim:
        raise UnfitError
    return d.random.randrange(-ndim, ndim)


WEIGHTS = {
    "elementwise": 5,
    "in place": 1,
    "buffer": 0.7,
    "matmul": 5,
    "reduction": 3,
    "view": 5,
    "concat": 2,
    "indexing": 1.5,
    "embedding": 1.5,
    "norm": 2,
    "attention": 1.5,
    "convolution": 1.5,
    "dropout": 0.7,
    "scalar": 1.5,
}
"""Relative frequency with which each kind is drawn."""
