"""The text of formulas, read as sympy does but for arithmetic alone: nothing that a file says is executed.

    3*batch*hidden**2/(8*tp) + Max(2.0e-9*batch, layers) + ceiling(257/tp) + all_reduce_over_tp(8*batch)

`evaluate` works in any numbers: exact fractions, or sympy's expressions.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autopar.errors import PlanError

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers to work in: `of` reads a constant, `functions` are those that a formula may call."""

    of: Callable[[int | float], Any]
    functions: Mapping[str, Callable[..., Any]]

    def with_functions(self, more: Mapping[str, Callable[..., Any]]) -> Numbers:
        return Numbers(self.of, {**self.functions, **more})


EXACT = Numbers(
    lambda value: Fraction(value) if isinstance(value, int) else value,
    {"Max": max, "Min": min, "ceiling": math.ceil, "floor": math.floor},
)
"""Fractions; floats where the formula has them."""


def evaluate(text: str, values: Mapping[str, Any], numbers: Numbers = EXACT) -> Any:
    """The value of a formula, or the list of values of a list; PlanError where the text is no formula.

    >>> evaluate("batch/dp + 1", {"batch": 8, "dp": 2})
    Fraction(5, 1)
    """
    try:
        return _value(ast.parse(text, mode="eval").body, values, numbers, text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise PlanError(f"not a formula: {text[:80]!r} ({error}); give what formulas_of wrote.") from error


def _value(node: ast.expr, values: Mapping[str, Any], numbers: Numbers, text: str) -> Any:
    def value(of: ast.expr) -> Any:
        return _value(of, values, numbers, text)

    match node:
        case ast.Constant(value=int() | float()):
            return numbers.of(node.value)  # type: ignore[arg-type]
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](value(left), value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in numbers.functions:
            return numbers.functions[name](*map(value, args))
        case ast.List(elts=elements):
            return [value(element) for element in elements]
    raise PlanError(f"a formula cannot say {ast.unparse(node)[:80]!r}; it may name {', '.join(values)}.")
