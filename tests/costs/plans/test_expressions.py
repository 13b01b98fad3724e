"""Formulas are read as sympy reads them; what is no arithmetic, or has no bounded value, is refused at once."""

from __future__ import annotations

import ast
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costs.plans.expressions import evaluate
from autopar.errors import PlanError

VALUES = {"batch": Fraction(8), "tp": Fraction(3), "Max": Fraction(5)}


def _sums(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, st.sampled_from(("+", "-", "*", "/")), inner).map(" ".join)
    return (
        two.map("({})".format)
        | two
        | inner.map("ceiling({})".format)
        | st.tuples(inner, inner).map("Min({0[0]}, {0[1]})".format)
    )


ATOMS = st.sampled_from(("batch", "tp", "tp**2", "batch**10", "3", "17", "0.5"))


@settings(deadline=None)
@given(st.recursive(ATOMS, _sums, max_leaves=8))
def test_a_formula_has_the_value_that_python_gives_it(text: str) -> None:
    names = {**VALUES, "ceiling": lambda x: Fraction(math.ceil(x)), "Min": min}
    exact = ast.unparse(_Fractions().visit(ast.parse(text, mode="eval")))
    try:
        expected = eval(exact, {"Fraction": Fraction}, names)
    except ZeroDivisionError:
        with pytest.raises(PlanError, match="divides by zero"):
            evaluate(text, VALUES)
        return
    assert evaluate(text, VALUES) == expected


class _Fractions(ast.NodeTransformer):
    """Whole numbers as fractions, but for exponents."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        return node if isinstance(node.op, ast.Pow) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.parse(f"Fraction({node.value!r})", mode="eval").body if isinstance(node.value, int) else node


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-batch**2", -64),
        ("2 - -1", None),
        ("1.5e-3*batch", 0.012),
        ("2e2", 200.0),
        ("Max*Max(1, Max)", 25),
        ("floor(batch/tp) + ceiling(-batch/tp)", 0),
        (" ( 1 ) ", 1),
    ],
)
def test_signs_numbers_and_names(text: str, value: float | None) -> None:
    if value is None:
        with pytest.raises(PlanError, match="found '-1' at character 5, needed a number"):
            evaluate(text, VALUES)
    else:
        assert evaluate(text, VALUES) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os')", r"found \"__import__\('os'\)\" at character 10, needed a number of at most 40 digits"),
        ("batch.real", "found '.real' at character 5, needed a number, a symbol or a sign"),
        ("[x for x in batch]", "needed a number, a symbol or a sign"),
        ("batch if batch else 1", "found 'if batch else 1' at character 8, needed the end"),
        ("Max(batch, key=1)", "one of batch, tp, Max"),
        ("lambda: 1", "needed a number"),
        ("1 +", "found '' at character 3"),
        ("", "found '' at character 0"),
        ("(1", r"needed \)"),
        ("ceiling", "one of batch"),
        ("ceiling(1, 2)", "has no value"),
        ("Max()", "one of batch"),
        ("1/0", "'1/0' divides by zero"),
        ("batch/(tp - 3)", "divides by zero"),
        ("9**9**9**9", r"found '\*\*9\*\*9' at character 6, needed the end"),
        ("9**99", "a whole exponent of at most 64"),
        ("batch**-1", "a whole exponent of at most 64"),
        ("2**0.5", "a whole exponent of at most 64"),
        ("(" * 100_000 + "1" + ")" * 100_000, "at most 60 brackets in each other"),
        ("-" * 100_000 + "1", "found '---"),
        ("(((batch**64)**64)**64)**64", "too many digits"),
        ("*".join(["batch"] * 10_000), "too many digits"),
        (" + ".join(f"1/{n}" for n in range(1, 9000)), "too many digits"),
        ("1e308*10.0*1e308", "not finite"),
        ("1e999", "not finite|no value"),
        ("1" * 41, "a number of at most 40 digits"),
        ("1" * 2**19, "it has 524288 characters; it may have 262144"),
        ("x" * 2**17, "needed a number"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_formula_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"not a formula: .*(?:{message})"):
        evaluate(text, VALUES)


def test_a_long_sum_is_read_without_going_down() -> None:
    assert evaluate(" + ".join(["batch"] * 20_000), VALUES) == 160_000
