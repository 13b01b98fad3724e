"""The text of formulas: a grammar of few terms, read by hand and within bounds; nothing that a file says is executed.

    sum      = ["-"] product {("+" | "-") product}
    product  = power {("*" | "/") power}
    power    = atom ["**" whole number]
    atom     = number | symbol | function "(" sum {"," sum} ")" | "(" sum ")"

    3*batch*hidden**2/(8*tp) + Max(2.0e-9*batch, layers) + ceiling(257/tp) + all_reduce_over_tp(8*batch)

sympy reads it alike. `evaluate` works in any numbers: exact fractions, or sympy's expressions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autopar.errors import PlanError

MAX_CHARACTERS = 2**18
MAX_NESTED = 60
MAX_EXPONENT = 64
MAX_DIGITS = 40
MAX_BITS = 1000
"""Largest number of bits of a fraction's numerator or denominator: a float can hold it."""
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?|[0-9]+)|(?P<name>[^\W\d]\w*)|(?P<sign>\*\*|[-+*/(),]))"
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers to work in: `of` reads a constant, `functions` are those that a formula may call."""

    of: Callable[[int | float], Any]
    functions: Mapping[str, Callable[..., Any]]
    checked: Callable[[Any], Any] = lambda value: value
    """Every intermediate result goes through it."""

    def with_functions(self, more: Mapping[str, Callable[..., Any]]) -> Numbers:
        return Numbers(self.of, {**self.functions, **more}, self.checked)


def _bounded(value: Fraction | float) -> Fraction | float:
    """Return the number, unless it is too large or too long to go on with."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise OverflowError("a number in it has too many digits")
    elif not math.isfinite(value):
        raise OverflowError("a number in it is not finite")
    return value


EXACT = Numbers(
    lambda value: Fraction(value) if isinstance(value, int) else value,
    {
        "Max": max,
        "Min": min,
        "ceiling": lambda value: Fraction(math.ceil(value)),
        "floor": lambda value: Fraction(math.floor(value)),
    },
    _bounded,
)
"""Fractions; floats where the formula has them."""


def evaluate(text: str, values: Mapping[str, Any], numbers: Numbers = EXACT) -> Any:
    """Return the value of a formula; PlanError where the text is no formula, or has no value.

    >>> evaluate("batch/dp + 1", {"batch": 8, "dp": 2})
    Fraction(5, 1)
    """
    if len(text) > MAX_CHARACTERS:
        raise PlanError(f"not a formula: it has {len(text)} characters; it may have {MAX_CHARACTERS}.")
    reader = _Reader(text, values, numbers)
    try:
        value = reader.sum()
        if reader.kind:
            raise reader.unexpected("the end")
        return value
    except ZeroDivisionError as error:
        raise PlanError(f"not a formula: {text[:80]!r} divides by zero; give what Plan.save wrote.") from error
    except (OverflowError, TypeError) as error:
        raise PlanError(f"not a formula: {text[:80]!r} has no value ({error}); give what Plan.save wrote.") from error


class _Reader:
    """Reads a text from left to right, and computes as it reads: `kind` and `token` are what comes next."""

    def __init__(self, text: str, values: Mapping[str, Any], numbers: Numbers) -> None:
        self.text, self.values, self.numbers = text, values, numbers
        self.position, self.nested = 0, 0
        self.kind, self.token = "", ""
        self.advance()

    def advance(self) -> str:
        """Go on behind the next token, and return it."""
        passed, found = self.token, _TOKEN.match(self.text, self.position)
        if found is None:
            self.kind, self.token = "", ""
            if self.text[self.position :].strip():
                raise self.unexpected("a number, a symbol or a sign")
        else:
            self.kind, self.token, self.position = str(found.lastgroup), found[str(found.lastgroup)], found.end()
        return passed

    def unexpected(self, needed: str) -> PlanError:
        """Return the error for text at the current position that is not what was needed."""
        here = self.text[max(0, self.position - len(self.token)) :][:40]
        return PlanError(f"not a formula: found {here!r} at character {self.position}, needed {needed}.")

    def sum(self) -> Any:
        value = -self.product() if self._take_token("-") else self.product()
        while self.token in ("+", "-"):
            if self.advance() == "+":
                value = self.numbers.checked(value + self.product())
            else:
                value = self.numbers.checked(value - self.product())
        return value

    def product(self) -> Any:
        value = self.power()
        while self.token in ("*", "/"):
            if self.advance() == "*":
                value = self.numbers.checked(value * self.power())
            else:
                value = self.numbers.checked(value / self.power())
        return value

    def power(self) -> Any:
        value = self.atom()
        if not self._take_token("**"):
            return value
        if not self.token.isdecimal() or len(self.token) > 2 or int(self.token) > MAX_EXPONENT:
            raise self.unexpected(f"a whole exponent of at most {MAX_EXPONENT}")
        return self.numbers.checked(value ** int(self.advance()))

    def atom(self) -> Any:
        if self.kind == "number" and len(self.token) <= MAX_DIGITS:
            digits = self.advance()
            return self.numbers.checked(self.numbers.of(int(digits) if digits.isdecimal() else float(digits)))
        if self._take_token("("):
            return self.closed()[0]
        if self.kind == "name" and self._calls():
            function = self.numbers.functions[self.advance()]
            self.advance()
            return self.numbers.checked(function(*self.closed(",")))
        if self.kind == "name" and self.token in self.values:
            return self.values[self.advance()]
        known = ", ".join(self.values)
        raise self.unexpected(f"a number of at most {MAX_DIGITS} digits, (, or one of {known}")

    def _calls(self) -> bool:
        """Return whether a function call comes next; an axis, and so a symbol, may have the same name."""
        return self.token in self.numbers.functions and self.text[self.position :].lstrip().startswith("(")

    def closed(self, between: str = "") -> list[Any]:
        """Return the values up to a closing bracket."""
        self.nested += 1
        if self.nested > MAX_NESTED:
            raise self.unexpected(f"at most {MAX_NESTED} brackets in each other")
        found = [self.sum()]
        while between and self._take_token(between):
            found.append(self.sum())
        if not self._take_token(")"):
            raise self.unexpected(")")
        self.nested -= 1
        return found

    def _take_token(self, token: str) -> bool:
        """Return whether `token` comes next, and consume it if so."""
        if self.token != token:
            return False
        self.advance()
        return True
