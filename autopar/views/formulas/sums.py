"""Sums of functions, written as text, times polynomials."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from autopar.views.formulas.symbols import Polynomial

Item = TypeVar("Item")


class Sum:
    """A sum of functions, written as text, times polynomials; equal functions are joined."""

    def __init__(self) -> None:
        self._counts: dict[str, list[Polynomial]] = defaultdict(list)

    def add(self, count: Polynomial, function: str = "") -> None:
        self._counts[function].append(count)

    def __str__(self) -> str:
        parts = []
        for function, counts in self._counts.items():
            count = str(Polynomial.sum(counts))
            if count == "0":
                continue
            one_term = " " not in count
            factor = count if one_term else f"({count})"
            parts.append(factor if not function else function if count == "1" else f"{factor}*{function}")
        return _added(parts)


def multiplied(share: str, function: str) -> str:
    return f"{share}*{function}" if share else function


def _added(parts: list[str]) -> str:
    """Return a sum in groups, as parsers go down one level for each term of a long one."""
    while len(parts) > _GROUP:
        parts = [f"({' + '.join(parts[i : i + _GROUP])})" for i in range(0, len(parts), _GROUP)]
    return " + ".join(parts) or "0"


_GROUP = 40


def grouped(items: Iterable[Item], same: Callable[[Item], Hashable]) -> list[tuple[Item, int]]:
    """Return the first of all items that are the same, and how many they are."""
    found: dict[Hashable, tuple[Item, int]] = {}
    for item in items:
        key = same(item)
        first, times = found.get(key, (item, 0))
        found[key] = (first, times + 1)
    return list(found.values())
