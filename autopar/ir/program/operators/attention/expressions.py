"""Attention masks and scores as expressions in vectors: `bitwise_and(le(v1, v0), eq(v3, v2))`.

A vector has no dim of queries, or none of keys, and is broadcast to the scores [batch, heads, queries, keys]. The
functions work on every element alone, so that an expression says any block of the mask from parts of its vectors. They
have a second reading: given how low and how high vectors are within blocks, how low and how high the mask may be in
each of them. A mask is so known to hide a block, or to let all of it be seen, without one of its elements being made.

An expression may also be a function of the scores themselves, `add(mul(tanh(div(score, 30.0)), 30.0), v0)`: its
values are then what the softmax is taken of, and DERIVATIVES says how they change with the scores.

Expressions are Python's: calls of FUNCTIONS, vectors v0, v1, …, `score`, numbers, True, False, inf, and types by name
(float32).
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Bounds = tuple[Tensor, Tensor]
"""The lowest and the highest value, elementwise."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function of FUNCTIONS with its arguments: calls, vectors, numbers and types."""

    name: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(_text, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Vector:
    number: int

    def __str__(self) -> str:
        return f"v{self.number}"


@dataclass(frozen=True, slots=True)
class Score:
    """The scores, queries times keys and scaled."""

    def __str__(self) -> str:
        return "score"


Expression = Call | Vector | Score


def _text(argument: object) -> str:
    return str(argument).removeprefix("torch.") if isinstance(argument, torch.dtype) else str(argument)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """Return the expression of a text, as `str` writes it.

    >>> str(parse("masked_fill(to(v0, float32), le(v1, sub(v2, -8)), -inf)"))
    'masked_fill(to(v0, float32), le(v1, sub(v2, -8)), -inf)'
    """
    return _read(ast.parse(text, mode="eval").body)


def _read(tree: ast.AST) -> Any:
    match tree:
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in FUNCTIONS:
            return Call(name, tuple(map(_read, arguments)))
        case ast.Constant(value=bool() | int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read(operand)
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id="score"):
            return Score()
        case ast.Name(id=name) if name[0] == "v" and name[1:].isdigit():
            return Vector(int(name[1:]))
        case ast.Name(id=name) if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
    raise AssertionError(f"{ast.unparse(tree)} is no part of a mask")


def evaluate(expression: Expression, vectors: Sequence[Tensor], score: Tensor | None = None) -> Tensor:
    """Return the values of an expression for these vectors, or for parts of them."""
    if isinstance(expression, Vector):
        return vectors[expression.number]
    if isinstance(expression, Score):
        assert score is not None, "an expression in scores needs them"
        return score
    given = [evaluate(x, vectors, score) if isinstance(x, Expression) else x for x in expression.arguments]
    return getattr(aten, expression.name)(*given)


def reads_scores(expression: object) -> bool:
    """Return whether an expression is a function of the scores."""
    return isinstance(expression, Score) or (
        isinstance(expression, Call) and any(map(reads_scores, expression.arguments))
    )


def is_differentiable(expression: object) -> bool:
    """Return whether DERIVATIVES has all functions that an expression applies to scores."""
    if not isinstance(expression, Call) or not reads_scores(expression):
        return True
    return expression.name in DERIVATIVES and all(map(is_differentiable, expression.arguments))


def with_derivative(expression: Expression, vectors: Sequence[Tensor], score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of a function of the scores, and their derivatives by them."""
    if isinstance(expression, Score):
        return score, torch.ones_like(score)
    assert isinstance(expression, Call), f"{expression} does not read the scores"
    values, changes = [], []
    for argument in expression.arguments:
        value, change = argument, 0.0
        if reads_scores(argument):
            value, change = with_derivative(argument, vectors, score)
        elif isinstance(argument, Expression):
            value = evaluate(argument, vectors)
        values.append(value)
        changes.append(change)
    found = getattr(aten, expression.name)(*values)
    return found, DERIVATIVES[expression.name](found, values, changes)


def of_keys(vector: Tensor) -> bool:
    """Return whether a vector has a dim of keys, not of queries."""
    return vector.ndim > 0 and vector.shape[-1] > 1


def part_of(vector: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Return the part of a vector for a range of queries and a range of keys."""
    if of_keys(vector):
        return vector[..., slice(*keys)]
    return vector[..., slice(*queries), :] if vector.ndim > 1 and vector.shape[-2] > 1 else vector


class UnboundedError(Exception):
    """Nothing is known of what a function gives."""


def bounds(expression: Expression, vectors: Sequence[Bounds]) -> Bounds:
    """Return lower and upper bounds of an expression, given bounds of its vectors, which these need not reach.

    Raises:
        UnboundedError: it has a function without known bounds.
    """
    if isinstance(expression, Vector):
        return vectors[expression.number]
    # Scores are anything.
    if isinstance(expression, Score) or (reads_scores(expression) and expression.name not in HIDING):
        return torch.tensor(-math.inf), torch.tensor(math.inf)
    function = FUNCTIONS[expression.name]
    if function is None:
        raise UnboundedError(expression.name)
    given = [bounds(x, vectors) if isinstance(x, Expression) else _exactly(x) for x in expression.arguments]
    low, high = function(*given)
    return _known(low, -math.inf), _known(high, math.inf)


def _exactly(argument: object) -> Any:
    if isinstance(argument, torch.dtype):
        return argument
    value = torch.tensor(argument)
    return value, value


def _known(bound: Tensor, otherwise: float) -> Tensor:
    """Replace nan in a bound by the trivial bound, as nan tells nothing."""
    return bound.nan_to_num(otherwise, math.inf, -math.inf) if bound.is_floating_point() else bound


def _rising(name: str) -> Callable[..., Bounds]:
    """Bounds of what grows with all arguments."""
    function = getattr(aten, name)
    return lambda *given: (function(*(low for low, _ in given)), function(*(high for _, high in given)))


def _of_truths(name: str) -> Callable[..., Bounds]:
    """Bounds of a bitwise function of truth values that grows with both."""
    rising = _rising(name)

    def bounded(*given: Bounds) -> Bounds:
        if any(x.dtype is not torch.bool for both in given for x in both):
            raise UnboundedError(name)
        return rising(*given)

    return bounded


def _truth(x: Bounds) -> Bounds:
    low, high = x
    return (low > 0) | (high < 0), (low != 0) | (high != 0)


def _logical(name: str) -> Callable[..., Bounds]:
    rising = _rising(name)
    return lambda *given: rising(*map(_truth, given))


def _logical_not(x: Bounds) -> Bounds:
    low, high = _truth(x)
    return ~high, ~low


def _bitwise_not(x: Bounds) -> Bounds:
    if x[0].dtype is not torch.bool or x[1].dtype is not torch.bool:
        raise UnboundedError("bitwise_not")
    return _logical_not(x)


def _comparison(name: str) -> Callable[[Bounds, Bounds], Bounds]:
    """Bounds of `lt` or `le`."""
    function = getattr(aten, name)
    return lambda a, b: (function(a[1], b[0]), function(a[0], b[1]))


def _equal(a: Bounds, b: Bounds) -> Bounds:
    return (a[0] == b[1]) & (a[1] == b[0]), (a[0] <= b[1]) & (b[0] <= a[1])


def _neg(x: Bounds) -> Bounds:
    return -x[1], -x[0]


def _mul(a: Bounds, b: Bounds) -> Bounds:
    products = [x * y for x in a for y in b]
    # 0 · inf is no number: nothing is known.
    low = functools.reduce(torch.minimum, (_known(x, -math.inf) for x in products))
    return low, functools.reduce(torch.maximum, (_known(x, math.inf) for x in products))


def _abs(x: Bounds) -> Bounds:
    low, high = x[0].abs(), x[1].abs()
    nearest = torch.minimum(low, high).masked_fill((x[0] <= 0) & (x[1] >= 0), 0)
    return nearest, torch.maximum(low, high)


def _selection(condition: Bounds, x: Bounds, y: Bounds) -> Bounds:
    surely, maybe = condition
    low = torch.where(surely, x[0], torch.where(maybe, torch.minimum(*_as_one(x[0], y[0])), y[0]))
    high = torch.where(surely, x[1], torch.where(maybe, torch.maximum(*_as_one(x[1], y[1])), y[1]))
    return low, high


def _filled(x: Bounds, condition: Bounds, value: Bounds) -> Bounds:
    low, high = value
    return _selection(condition, (low.to(x[0].dtype), high.to(x[1].dtype)), x)


def _as_one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.result_type(x, y)
    return x.to(both), y.to(both)


def _floor_divide(a: Bounds, b: Bounds) -> Bounds:
    if not torch.equal(*b) or b[0].ndim or b[0] <= 0:
        raise UnboundedError("floor_divide")
    return torch.floor(a[0] / b[0]), torch.floor(a[1] / b[0])


def _cast(x: Bounds, dtype: torch.dtype) -> Bounds:
    if dtype is torch.bool:
        return _truth(x)
    if dtype.is_floating_point:
        return x[0].to(dtype), x[1].to(dtype)
    whole = [each.trunc() if each.is_floating_point() else each for each in x]
    return whole[0], whole[1]


FUNCTIONS: Mapping[str, Callable[..., Bounds] | None] = {
    **{name: _rising(name) for name in ("add", "maximum", "minimum", "tanh", "sigmoid", "exp")},
    **{name: _of_truths(name) for name in ("bitwise_and", "bitwise_or")},
    **{name: _logical(name) for name in ("logical_and", "logical_or")},
    **dict.fromkeys(("bitwise_xor", "logical_xor", "div", "remainder", "square", "pow", "sign"), None),
    "lt": _comparison("lt"),
    "le": _comparison("le"),
    "gt": lambda a, b: _comparison("lt")(b, a),
    "ge": lambda a, b: _comparison("le")(b, a),
    "eq": _equal,
    "ne": lambda a, b: _logical_not(_equal(a, b)),
    "logical_not": _logical_not,
    "bitwise_not": _bitwise_not,
    "sub": lambda a, b: _rising("add")(a, _neg(b)),
    "rsub": lambda a, b: _rising("add")(b, _neg(a)),
    "neg": _neg,
    "abs": _abs,
    "mul": _mul,
    "floor_divide": _floor_divide,
    "where": _selection,
    "masked_fill": _filled,
    "to": _cast,
}
"""ATen's elementwise functions that masks are made with, and the bounds of what they give; None: nothing is known."""

HIDING = ("where", "masked_fill")
"""Functions that may give -inf whatever the scores are."""

DERIVATIVES: Mapping[str, Callable[[Tensor, list[Any], list[Any]], Any]] = {
    "add": lambda y, x, d: d[0] + d[1],
    "sub": lambda y, x, d: d[0] - d[1],
    "rsub": lambda y, x, d: d[1] - d[0],
    "neg": lambda y, x, d: -d[0],
    "mul": lambda y, x, d: d[0] * x[1] + x[0] * d[1],
    "div": lambda y, x, d: (d[0] - y * d[1]) / x[1],
    "tanh": lambda y, x, d: (1 - y * y) * d[0],
    "sigmoid": lambda y, x, d: y * (1 - y) * d[0],
    "exp": lambda y, x, d: y * d[0],
    "square": lambda y, x, d: 2 * x[0] * d[0],
    "abs": lambda y, x, d: x[0].sign() * d[0],
    "where": lambda y, x, d: aten.where(x[0], d[1], d[2]),
    "masked_fill": lambda y, x, d: aten.masked_fill(d[0], x[1], 0.0),
    "to": lambda y, x, d: d[0],
}
"""Function name → its derivative by the scores, from result, arguments and their derivatives (0.0 for an argument that
does not read scores)."""
