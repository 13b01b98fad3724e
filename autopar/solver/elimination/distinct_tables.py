"""The distinct tables of a problem, at prices of its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from autopar.solver.deadline import check_whole
from autopar.solver.problem import Floats, Integers, Problem, only_bytes

SURROUNDINGS = 3  # edges: nodes whose surroundings are equal so far are of one kind

_Table = tuple[Floats, tuple[Integers | None, ...]]
"""Seconds, and bytes in one problem after the other."""


class Tables:
    """Distinct tables of a problem: equal candidate lists share one table, and so do equal edges.

    `others` are the same problem with other bytes: equal tables have equal bytes in all of them.
    """

    def __init__(self, problem: Problem, others: Sequence[Problem] = ()) -> None:
        numbers: dict[object, int] = {}
        by_object: dict[tuple[object, ...], int] = {}  # the problems hold the arrays: an id names one of them
        content = _ContentKeys()
        self._node_tables: list[_Table] = []
        self._matrices: list[_Table] = []
        self.of_node: list[int] = []
        self.of_edge: list[int] = []
        for node, *more in zip(problem.nodes, *(each.nodes for each in others), strict=True):
            byte_arrays = (node.num_bytes, *(each.num_bytes for each in more))
            objects = (id(node.seconds), *map(id, byte_arrays))
            if objects not in by_object:
                key = (content.key(node.seconds), *map(content.key, byte_arrays))
                if key not in numbers:
                    numbers[key] = len(self._node_tables)
                    self._node_tables.append((node.seconds, byte_arrays))
                by_object[objects] = numbers[key]
            self.of_node.append(by_object[objects])
        by_object.clear()
        for edge, *more in zip(problem.edges, *(each.edges for each in others), strict=True):
            check_whole()
            of_edge = (edge.num_bytes, *(each.num_bytes for each in more))
            objects = (id(edge.seconds), *map(id, of_edge), edge.is_loop)
            if objects not in by_object:
                # An edge from a node to itself is chosen on its diagonal.
                by_bytes = [None if each is None else content.key(each) for each in of_edge]
                edge_key = (content.key(edge.seconds), *by_bytes, edge.is_loop)
                if edge_key not in numbers:
                    numbers[edge_key] = len(self._node_tables) + len(self._matrices)
                    table = edge.seconds, of_edge
                    if edge.is_loop:
                        table = np.diagonal(edge.seconds), tuple(map(_diagonal, of_edge))
                    self._matrices.append(table)
                by_object[objects] = numbers[edge_key]
            self.of_edge.append(by_object[objects])

    def __len__(self) -> int:
        return len(self._node_tables) + len(self._matrices)

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
        return [*self._node_tables, *self._matrices]

    def weighted(self, *prices: float) -> list[Floats]:
        """Return the tables of the seconds and the bytes of each problem at its price (in seconds per byte)."""
        return [
            seconds + paid if (paid := _paid(byte_arrays, prices)) is not None else seconds
            for seconds, byte_arrays in self.costs()
        ]

    def bytes_only(self) -> list[Floats]:
        """Return the tables of the bytes alone, which keep what is forbidden; exact below 2**53 bytes."""
        return [only_bytes(seconds, byte_arrays[0]) for seconds, byte_arrays in self.costs()]


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
