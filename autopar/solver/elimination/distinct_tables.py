"""The distinct tables of a problem, at prices of its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from autopar.solver.deadline import check_whole
from autopar.solver.problem import Edge, Floats, Integers, Node, Problem

SURROUNDINGS = 3  # edges: nodes whose surroundings are equal so far are of one kind

_Table = tuple[Floats, tuple[Integers | None, ...]]
"""Seconds, and bytes in one problem after the other."""


class Tables:
    """Distinct tables of a problem: equal candidate lists share one table, and so do equal edges.

    `others` are the same problem with other bytes: equal tables have equal bytes in all of them.
    """

    def __init__(self, problem: Problem, others: Sequence[Problem] = ()) -> None:
        self._tables: list[_Table] = []
        numbers: dict[object, int] = {}
        by_object: dict[tuple[object, ...], int] = {}  # the problems hold the arrays: an id names one of them
        content = _ContentKeys()

        def number_of(parts: Sequence[Node | Edge], is_loop: bool = False) -> int:
            check_whole()
            seconds, byte_arrays = parts[0].seconds, tuple([each.num_bytes for each in parts])
            objects = (id(seconds), *map(id, byte_arrays), is_loop)
            if objects not in by_object:
                of_bytes = [None if each is None else content.key(each) for each in byte_arrays]
                key = (content.key(seconds), *of_bytes, is_loop)
                if key not in numbers:
                    numbers[key] = len(self._tables)
                    table = seconds, byte_arrays
                    if is_loop:  # an edge from a node to itself is chosen on its diagonal
                        table = np.diagonal(seconds), tuple(map(_diagonal, byte_arrays))
                    self._tables.append(table)
                by_object[objects] = numbers[key]
            return by_object[objects]

        problems = (problem, *others)
        self.of_node = [number_of(parts) for parts in zip(*(each.nodes for each in problems), strict=True)]
        edges = zip(*(each.edges for each in problems), strict=True)
        self.of_edge = [number_of(parts, parts[0].is_loop) for parts in edges]

    def __len__(self) -> int:
        return len(self._tables)

    def kinds(self, problem: Problem) -> list[int]:
        """Return a number per node, the same for nodes with equal tables and surroundings (Weisfeiler & Leman 1968)."""
        at: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
        for number, edge in enumerate(problem.edges):
            for place, end in enumerate(edge.ends):
                at[end].append((number, place))
        kinds = self.of_node
        for _ in range(SURROUNDINGS):
            of_edge = [
                (table, *[kinds[end] for end in e.ends]) for table, e in zip(self.of_edge, problem.edges, strict=True)
            ]
            numbers: dict[object, int] = {}
            kinds = [
                numbers.setdefault((kind, *sorted((of_edge[number], place) for number, place in around)), len(numbers))
                for kind, around in zip(kinds, at, strict=True)
            ]
        return kinds

    def costs(self) -> list[_Table]:
        """Return the seconds of every table, and its bytes in each of the problems; None: no bytes."""
        return self._tables

    def weighted(self, *prices: float) -> list[Floats]:
        """Return the tables of the seconds and the bytes of each problem at its price (in seconds per byte)."""
        return [
            seconds + paid if (paid := _paid(byte_arrays, prices)) is not None else seconds
            for seconds, byte_arrays in self.costs()
        ]


def _paid(byte_arrays: tuple[Integers | None, ...], prices: tuple[float, ...]) -> Floats | None:
    """Return the total price of the bytes of all problems; None if it is zero."""
    parts = [price * each for price, each in zip(prices, byte_arrays, strict=True) if each is not None and price]
    return sum(parts[1:], parts[0]).astype(np.float64, copy=False) if parts else None


def _diagonal(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else np.diagonal(array)


class _ContentKeys:
    """Keys of arrays by content, computed once per object."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[object, tuple[object, ...]]] = {}

    def key(self, array: np.ndarray) -> tuple[object, ...]:
        if id(array) not in self._by_object:
            digest = hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()
            # The array is kept with its key: an id means something only while the object lives.
            self._by_object[id(array)] = (array, (array.shape, array.dtype.str, digest))
        return self._by_object[id(array)][1]
