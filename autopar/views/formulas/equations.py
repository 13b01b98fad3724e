"""Equations between sizes, solved by passing on what is known: equal dims, products (h d) and sums (a cat, a pad).

Variables are numbers from 0. Each has the value that it takes now; solving finds the `Size` that it is the value of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from autopar.views.formulas.symbols import Size


@dataclass(frozen=True, slots=True)
class Equation:
    """`whole` is the product of its `parts`, or their sum and a constant."""

    whole: int
    parts: tuple[int, ...]
    is_product: bool
    constant: int = 0
    where: str = ""


@dataclass(slots=True)
class Equations:
    """Variables, what is known of them, and the first contradiction of each symbol."""

    numbers: list[int] = field(default_factory=list)
    """Variable → its value now."""
    parent: list[int] = field(default_factory=list)
    known: dict[int, Size] = field(default_factory=dict)
    """The first of each class of equal variables → its size."""
    watched: dict[int, list[Equation]] = field(default_factory=lambda: defaultdict(list))
    products: list[Equation] = field(default_factory=list)
    conflicts: dict[str, str] = field(default_factory=dict)
    """Symbol → where it would have to equal a number."""
    _news: list[int] = field(default_factory=list)
    """Classes whose size was found, and not passed on yet."""

    def variable(self, number: int) -> int:
        self.numbers.append(number)
        self.parent.append(len(self.parent))
        if number == 1:
            self.known[len(self.parent) - 1] = Size.of(1)
        return len(self.parent) - 1

    def root(self, variable: int) -> int:
        parent = self.parent
        while parent[variable] != variable:
            parent[variable] = parent[parent[variable]]
            variable = parent[variable]
        return variable

    def size(self, variable: int) -> Size | None:
        return self.known.get(self.root(variable))

    def equal(self, left: int, right: int, where: str = "") -> None:
        """Make two variables one; those that differ now are not the same thing, whatever an operation says."""
        left, right = self.root(left), self.root(right)
        if left == right or self.numbers[left] != self.numbers[right]:
            return
        self.parent[right] = left
        self.watched[left] += self.watched.pop(right, [])
        value = self.known.pop(right, None)
        if value is not None:
            self.learn(left, value, where)
        elif left in self.known:
            self._news.append(left)

    def equate(self, named: Iterable[tuple[Hashable, int]], where: str) -> dict[Hashable, int]:
        """Make variables of one name equal; return the first of each name."""
        first: dict[Hashable, int] = {}
        for name, variable in named:
            self.equal(first.setdefault(name, variable), variable, where)
        return first

    def learn(self, variable: int, value: Size, where: str = "") -> None:
        """Set a size; where it has another already, that stays, and the contradiction is noted."""
        assert value == self.numbers[variable], f"{where}: {value.polynomial} is {value}, not {self.numbers[variable]}"
        root = self.root(variable)
        before = self.known.get(root)
        if before is None:
            self.known[root] = value
            self._news.append(root)
        elif before.polynomial != value.polynomial:
            here, there = before.polynomial.symbols, value.polynomial.symbols
            for symbol in sorted(here ^ there or here):
                self.conflicts.setdefault(symbol, f"{where}: {before.polynomial} has to equal {value.polynomial}")

    def add(self, equation: Equation) -> None:
        if equation.is_product:
            self.products.append(equation)
        for variable in {self.root(each) for each in (equation.whole, *equation.parts)}:
            self.watched[variable].append(equation)
        self._apply(equation)

    def _solve(self) -> None:
        """Pass on all that is known."""
        while self._news:
            for equation in list(self.watched.get(self.root(self._news.pop()), ())):
                self._apply(equation)

    def settle(self) -> None:
        """Let every size that does not follow be a number: inner factors of groups first, whose outermost then
        follows.
        """
        self._solve()
        inner = [part for equation in self.products for part in reversed(equation.parts[1:])]
        for variable in (*inner, *range(len(self.parent))):
            if self.root(variable) not in self.known:
                self.learn(variable, Size.of(self.numbers[variable]))
                self._solve()

    def _apply(self, equation: Equation) -> None:
        parts = [self.root(part) for part in equation.parts]
        sizes = [self.known.get(part) for part in parts]
        given = [size for size in sizes if size is not None]
        whole = self.size(equation.whole)
        if len(given) == len(sizes):
            found = math.prod(given) if equation.is_product else sum(given) + equation.constant
            self.learn(equation.whole, Size.of(found), equation.where)
            return
        (unknown, *others) = {part for part, size in zip(parts, sizes, strict=True) if size is None}
        if whole is None or others:
            return
        value = _solved(whole, given, len(sizes) - len(given), equation)
        if value is not None:
            self.learn(unknown, value, equation.where)


def _solved(whole: Size, given: Sequence[Size], count: int, equation: Equation) -> Size | None:
    """Return the one unknown part, which stands `count` times in the equation; None where it has no polynomial."""
    if not equation.is_product:
        return (whole - sum(given) - equation.constant) // count
    rest = Size.of(math.prod(given))
    return whole // rest if count == 1 and rest and len(rest.polynomial.terms) == 1 else None
