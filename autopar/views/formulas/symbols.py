"""Sizes that remember how they were computed: ints with a polynomial in batch, sequence, hidden and the mesh axes.

A `Size` is an int in every comparison, so that code written for numbers takes the same way on it as on the number;
sums, products and quotients also keep the polynomial:

    Size.symbol("batch", 8) * 16 // Size.symbol("dp", 2)    is 64 and remembers 16*batch/dp
    Size.symbol("batch", 8) / 2.5e9 + 1e-5                  is a polynomial: seconds, whose value nothing depends on

A quotient that is whole is kept as a monomial with negative exponents; one that is not becomes a rounded atom, as in
`ceiling(257/tp)`. So do functions: `Max(batch/tp, 8)`, `all_reduce_over_tp(16*batch)`. A float times a size is a float;
write the size first.
"""

from __future__ import annotations

import itertools
import keyword
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autopar.ir.sharding.mesh import Mesh

BATCH, SEQUENCE, HIDDEN, LAYERS = "batch", "sequence", "hidden", "layers"
Number = int | float | Fraction
Monomial = tuple[tuple[str, int], ...]
"""(symbol, exponent) pairs in the order of the symbols; () is one."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of coefficients times monomials; exponents may be negative. Printed as text that sympy reads."""

    terms: tuple[tuple[Monomial, Number], ...] = ()

    @classmethod
    def of(cls, value: Polynomial | Number) -> Polynomial:
        """Return a number as a polynomial; the polynomial of a Size."""
        if isinstance(value, Size):
            return value.polynomial
        if isinstance(value, Polynomial):
            return value
        return cls.collected([((), value)])

    @classmethod
    def symbol(cls, name: str, exponent: int = 1) -> Polynomial:
        """Return a symbol, or an atom: a function as it is written."""
        return cls(((((name, exponent),), 1),))

    @classmethod
    def collected(cls, terms: Iterable[tuple[Monomial, Number]]) -> Polynomial:
        """Return the sum of terms, of which several may have one monomial."""
        found: dict[Monomial, Number] = {}
        for monomial, coefficient in terms:
            found[monomial] = found.get(monomial, 0) + coefficient
        return cls(tuple((m, _plain(c)) for m, c in sorted(found.items(), key=lambda item: item[0]) if c))

    @classmethod
    def sum(cls, parts: Iterable[Polynomial]) -> Polynomial:
        return cls.collected(term for part in parts for term in part.terms)

    def __add__(self, other: Polynomial | Number) -> Polynomial:
        return Polynomial.sum((self, Polynomial.of(other)))

    __radd__ = __add__

    def __sub__(self, other: Polynomial | Number) -> Polynomial:
        return self + Polynomial.of(other) * -1

    def __rsub__(self, other: Number) -> Polynomial:
        return self * -1 + other

    def __mul__(self, other: Polynomial | Number) -> Polynomial:
        pairs = itertools.product(self.terms, Polynomial.of(other).terms)
        return Polynomial.collected((_product(left, right), a * b) for (left, a), (right, b) in pairs)

    __rmul__ = __mul__

    def __truediv__(self, other: Polynomial | Number) -> Polynomial:
        """Return the quotient; what is no monomial, by which tensors are divided, divides as an atom."""
        other = Polynomial.of(other)
        if len(other.terms) > 1:
            return self * Polynomial.symbol(f"({other})", -1)
        monomial, coefficient = next(iter(other.terms))
        inverse = 1 / (coefficient if isinstance(coefficient, float) else Fraction(coefficient))
        return self * Polynomial.collected([(tuple((name, -exponent) for name, exponent in monomial), inverse)])

    def __rtruediv__(self, other: Number) -> Polynomial:
        return Polynomial.of(other) / self

    def __bool__(self) -> bool:
        return bool(self.terms)

    @staticmethod
    def larger(one: Polynomial | Number, other: Polynomial | Number) -> Polynomial:
        """Return the larger of two amounts, as `costs.pricing.operations.larger` asks for it."""
        return Polynomial.symbol(f"Max({Polynomial.of(one)}, {Polynomial.of(other)})")

    @staticmethod
    def smaller(one: Polynomial | Number, other: Polynomial | Number) -> Polynomial:
        return Polynomial.symbol(f"Min({Polynomial.of(one)}, {Polynomial.of(other)})")

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols and rounded atoms that it depends on."""
        return frozenset(name for monomial, _ in self.terms for name, _ in monomial)

    @property
    def is_fraction(self) -> bool:
        """True if the polynomial may not be whole at other values of its symbols."""
        return any(
            (isinstance(coefficient, Fraction) and coefficient.denominator > 1) or any(e < 0 for _, e in monomial)
            for monomial, coefficient in self.terms
        )

    def __str__(self) -> str:
        """Return the sum, each function written once, with all that it is multiplied by."""
        multiples: dict[Monomial, list[tuple[Monomial, Number]]] = defaultdict(list)
        for monomial, value in sorted(self.terms):
            functions = tuple(each for each in monomial if "(" in each[0])
            multiples[functions].append((tuple(each for each in monomial if each not in functions), value))
        parts = []
        for functions, terms in multiples.items():
            if functions and len(terms) > 1:
                parts.append(f"({_added([_term(*term) for term in terms])})*{_term(functions, 1)}")
            else:
                parts += [_term((*monomial, *functions), value) for monomial, value in terms]
        return _added(parts)


_GROUP = 40


def _added(parts: Sequence[str]) -> str:
    """Return a sum in groups, as parsers go down one level for each term of a long one."""
    while len(parts) > _GROUP:
        parts = [f"({_added(parts[i : i + _GROUP])})" for i in range(0, len(parts), _GROUP)]
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _plain(value: Number) -> Number:
    """Return a fraction that is whole as an int, and a float of any kind as one."""
    if isinstance(value, float):
        return float(value)
    return value.numerator if type(value) is Fraction and value.denominator == 1 else value


def _product(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent))


def _term(monomial: Monomial, coefficient: Number) -> str:
    """Return a product as text: "3*batch*hidden/(8*tp)"."""
    whole = coefficient if isinstance(coefficient, float) else Fraction(coefficient).numerator
    part = 1 if isinstance(coefficient, float) else Fraction(coefficient).denominator
    above = [_power(name, exponent) for name, exponent in monomial if exponent > 0]
    below = [str(part)] * (part != 1) + [_power(name, -exponent) for name, exponent in monomial if exponent < 0]
    if whole == -1 and above:
        text = "-" + "*".join(above)
    else:
        text = "*".join([repr(whole)] * (whole != 1 or not above) + above)
    if not below:
        return text
    return f"{text}/{below[0]}" if len(below) == 1 else f"{text}/({'*'.join(below)})"


def _power(name: str, exponent: int) -> str:
    return name if exponent == 1 else f"{name}**{exponent}"


class Size(int):
    """An int with the polynomial it is the value of."""

    polynomial: Polynomial
    larger, smaller = staticmethod(Polynomial.larger), staticmethod(Polynomial.smaller)

    @classmethod
    def make(cls, value: int, polynomial: Polynomial) -> Size:
        size = cls(value)
        size.polynomial = polynomial
        return size

    @classmethod
    def symbol(cls, name: str, value: int) -> Size:
        """Return a symbol with the value that it has now."""
        return cls.make(value, Polynomial.symbol(name))

    @classmethod
    def of(cls, value: int) -> Size:
        """Return a number, which depends on nothing; a Size is itself."""
        return value if isinstance(value, Size) else cls.make(value, Polynomial.of(value))

    def __add__(self, other: Any) -> Any:
        found = self.polynomial + Polynomial.of(other)
        return Size.make(int(self) + int(other), found) if _is_whole(other) else found

    __radd__ = __add__

    def __neg__(self) -> Size:
        return Size.make(-int(self), self.polynomial * -1)

    def __sub__(self, other: Any) -> Any:
        return self + other * -1

    def __rsub__(self, other: int) -> Size:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        found = self.polynomial * Polynomial.of(other)
        return Size.make(int(self) * int(other), found) if _is_whole(other) else found

    __rmul__ = __mul__

    def __truediv__(self, other: Polynomial | Number) -> Polynomial:  # type: ignore[override]
        return self.polynomial / other

    def __rtruediv__(self, other: Number) -> Polynomial:  # type: ignore[override]
        return other / self.polynomial

    def __floordiv__(self, other: int) -> Size:
        """Return the quotient; where it is rounded now, it is rounded at all values."""
        value, divisor = int(self) // int(other), Polynomial.of(other)
        if int(self) % int(other) == 0 and len(divisor.terms) == 1:
            return Size.make(value, self.polynomial / divisor)
        if self.polynomial == divisor:
            return Size.of(1)
        if value < 0:  # -(-a // b), as ceilings are written
            return -Size.symbol(f"ceiling(({self.polynomial * -1})/({divisor}))", -value)
        return Size.symbol(f"floor(({self.polynomial})/({divisor}))", value)

    def __rfloordiv__(self, other: int) -> Size:
        return Size.of(other) // self


def _is_whole(value: object) -> bool:
    return not isinstance(value, float | Fraction | Polynomial)


def axis_symbols(mesh: Mesh) -> dict[str, str]:
    """Return the symbols of a mesh's axes, each with its axis: the axis's name, unless that is a size or a word of
    Python.
    """
    reserved = {BATCH, SEQUENCE, HIDDEN, LAYERS, "bytes"}
    return {f"{axis}_axis" if axis in reserved or keyword.iskeyword(axis) else axis: axis for axis in mesh.names}
