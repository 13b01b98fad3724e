"""Expressions are read as they are written, and their bounds hold whatever is within the bounds of their vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.program.operators.attention.expressions import FUNCTIONS, UnboundedError, bounds, evaluate, parse

BOUNDED = (
    "add(v0, v1)",
    "sub(v0, v1)",
    "rsub(v0, v1)",
    "mul(v0, v1)",
    "mul(v0, to(v1, float32))",
    "neg(v0)",
    "abs(v0)",
    "maximum(v0, v1)",
    "minimum(v0, v1)",
    "floor_divide(v0, 3)",
    "lt(v0, v1)",
    "le(v0, v1)",
    "gt(v0, v1)",
    "ge(v0, 1)",
    "eq(v0, v1)",
    "ne(v0, v1)",
    "logical_and(v0, v1)",
    "logical_or(v0, v1)",
    "logical_not(v0)",
    "bitwise_and(lt(v0, 2), gt(v1, 0))",
    "bitwise_or(lt(v0, 2), gt(v1, 0))",
    "bitwise_not(lt(v0, v1))",
    "where(lt(v0, v1), v0, 1)",
    "masked_fill(to(v0, float32), gt(v1, 0), -inf)",
    "masked_fill(gt(v0, 0), gt(v1, 0), 0)",
    "to(v0, bool)",
    "to(mul(to(v0, float32), 0.7), int64)",
)
UNBOUNDED = ("bitwise_and(v0, v1)", "remainder(v0, 3)", "floor_divide(v0, v1)", "bitwise_xor(v0, v1)")


@pytest.mark.parametrize("text", [*BOUNDED, *UNBOUNDED])
def test_a_text_is_what_its_expression_prints(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", ["cos(v0)", "v0.sum()", "__import__('os')", "[v0]", "w0"])
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(AssertionError, match="no part of a mask"):
        parse(text)


NUMBERS = st.lists(st.integers(-4, 4), min_size=1, max_size=4)


@pytest.mark.parametrize("text", BOUNDED)
@settings(deadline=None, max_examples=25)
@given(a=NUMBERS, b=NUMBERS)
def test_values_are_within_their_bounds(text: str, a: list[int], b: list[int]) -> None:
    expression, x, y = parse(text), torch.tensor(a), torch.tensor(b)
    values = evaluate(expression, [x[:, None], y[None]])
    low, high = bounds(expression, [(x.min(), x.max()), (y.min(), y.max())])
    assert bool((low <= values).all()) and bool((values <= high).all())
    assert low.dtype == high.dtype and (low.dtype is torch.bool) == (values.dtype is torch.bool)


@pytest.mark.parametrize("text", [text for text in BOUNDED if "mul" not in text and text != "floor_divide(v0, 3)"])
def test_of_single_values_all_is_known(text: str) -> None:
    vectors = [torch.tensor(3), torch.tensor(-2)]
    value = evaluate(parse(text), vectors)
    low, high = bounds(parse(text), [(x, x) for x in vectors])
    assert float(low) == float(high) == float(value)


@pytest.mark.parametrize("text", UNBOUNDED)
def test_of_some_functions_nothing_is_known(text: str) -> None:
    x = torch.tensor(1), torch.tensor(2)
    with pytest.raises(UnboundedError):
        bounds(parse(text), [x, x])


def test_every_function_is_one_of_aten() -> None:
    assert all(hasattr(torch.ops.aten, name) for name in FUNCTIONS)
