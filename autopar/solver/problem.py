"""The problem the planner solves, free of anything about tensors: candidate strategies, edges, a memory row.

    min  Σ_v seconds_v[x_v] + Σ_(u,v) seconds_uv[x_u, x_v]     over one choice x_v per node
    subject to  Σ_v bytes_v[x_v] + Σ_(u,v) bytes_uv[x_u, x_v] ≤ budget

A forbidden strategy or pair costs np.inf; a pin is a node in which all but some strategies are forbidden.
Arrays are kept as they are given (nodes and edges may share them), are checked when a problem is made of them, and
must not be changed afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Numbers = TypeVar("Numbers", Floats, Integers)
BLOCK = 1 << 21  # entries of a table that is built, or worked on, at once: 16 MB, a millisecond


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Something to be decided: k strategies with their seconds[k] and num_bytes[k]."""

    name: str
    seconds: Floats
    num_bytes: Integers

    def check(self) -> None:
        """Raise PlanError if the arrays do not describe candidate strategies."""
        _check_costs(self.seconds, self.where)
        if self.seconds.ndim != 1 or not len(self.seconds):
            raise PlanError(
                f"{self.where} has seconds of shape {self.seconds.shape}; give one number per strategy, at least one."
            )
        if self.num_bytes.shape != self.seconds.shape:
            raise PlanError(
                f"{self.where} has {len(self.seconds)} strategies but num_bytes of shape {self.num_bytes.shape}."
            )
        if self.num_bytes.dtype != np.int64:
            raise PlanError(
                f"{self.where} has num_bytes of type {self.num_bytes.dtype}; bytes are whole numbers (int64)."
            )
        if self.num_bytes.min() < 0:
            raise PlanError(
                f"{self.where} has {self.num_bytes.min()} bytes at strategy {self.num_bytes.argmin()}; the least is 0."
            )

    @property
    def where(self) -> str:
        return f"node {self.name!r}"

    @property
    def num_strategies(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Joint cost of two or three nodes (by position): an array with a dim per end. Parallel edges add up.

    Both ends of an edge of two may be the same node, which then pays the diagonal.
    """

    ends: tuple[int, ...]
    seconds: Floats
    num_bytes: Integers | None = None
    """Bytes of every combination; None: none."""

    def __post_init__(self) -> None:
        if len(self.ends) != 2 and (len(self.ends) != 3 or len(set(self.ends)) < 3):
            raise PlanError(f"{self.where} has {len(self.ends)} ends; give two, or three different ones.")

    def check(self) -> None:
        """Raise PlanError where the arrays do not belong to the ends, or hold what is no cost."""
        _check_costs(self.seconds, self.where)
        if self.seconds.ndim != len(self.ends):
            raise PlanError(
                f"{self.where} has seconds of shape {self.seconds.shape}; give a dim per end, {len(self.ends)}."
            )
        if self.num_bytes is None:
            return
        if self.num_bytes.shape != self.seconds.shape or self.num_bytes.dtype != np.int64:
            raise PlanError(
                f"{self.where} has num_bytes of shape {self.num_bytes.shape} and type {self.num_bytes.dtype}; "
                f"give whole numbers (int64) in the shape of its seconds, {self.seconds.shape}."
            )
        if self.num_bytes.size and self.num_bytes.min() < 0:
            raise PlanError(f"{self.where} has {self.num_bytes.min()} bytes somewhere; the least is 0.")

    @property
    def where(self) -> str:
        return f"edge {' → '.join(map(str, self.ends))}"

    @property
    def is_loop(self) -> bool:
        return self.ends[0] == self.ends[-1]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Nodes, or edges, that share their arrays, and for each dim of these the nodes that are chosen from."""

    seconds: Floats
    num_bytes: tuple[tuple[Integers, tuple[int, ...]], ...]
    """Arrays that hold some bytes, and the rows, by number, that each is that of."""
    ends: tuple[Integers, ...]
    edges: Integers
    """Numbers of the edges; negative for nodes."""


class Parts:
    """The nodes and edges of one problem with a memory row each, those of equal arrays together, to be added up.

    The problems differ in bytes and budgets.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._num_rows = len(problems)
        ends: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
        edges: dict[tuple[int, ...], list[int]] = defaultdict(list)
        arrays: dict[tuple[int, ...], tuple[Floats, list[Integers | None]]] = {}

        def add(parts: Sequence[Node | Edge], at: tuple[int, ...], number: int) -> None:
            seconds, of_rows = parts[0].seconds, [each.num_bytes for each in parts]
            key = id(seconds), len(at), *map(id, of_rows)
            ends[key].append(at)
            edges[key].append(number)
            arrays[key] = seconds, of_rows

        for number, nodes in enumerate(zip(*(each.nodes for each in problems), strict=True)):
            add(nodes, (number,), -1)
        for number, some in enumerate(zip(*(each.edges for each in problems), strict=True)):
            add(some, some[0].ends, number)
        self._alike = []
        holds: dict[int, bool] = {}
        for key, (seconds, of_each) in arrays.items():
            rows_of: dict[int, tuple[Integers, list[int]]] = {}
            for row, each in enumerate(of_each):
                if each is None:
                    continue
                if id(each) not in holds:
                    holds[id(each)] = bool(each.any())
                if holds[id(each)]:
                    rows_of.setdefault(id(each), (each, []))[1].append(row)
            byte_arrays = tuple([(each, tuple(rows)) for each, rows in rows_of.values()])
            self._alike.append(_Alike(seconds, byte_arrays, tuple(np.array(ends[key]).T), np.array(edges[key])))

    def cost_of(self, choices: Sequence[int], among: np.ndarray | None = None) -> tuple[float, list[int]]:
        """Return seconds, and bytes per row, of a choice per node: of all, or of some (a mask) and their edges."""
        chosen = np.array(choices, dtype=np.intp)
        seconds: list[float] = []
        num_bytes = [0] * self._num_rows
        for each in self._alike:
            which = slice(None) if among is None else np.all([among[ends] for ends in each.ends], axis=0)
            index = tuple([chosen[ends[which]] for ends in each.ends])
            seconds += each.seconds[index].tolist()
            for byte_arrays, rows in each.num_bytes:
                taken = int(byte_arrays[index].sum())
                for row in rows:
                    num_bytes[row] += taken
        return math.fsum(seconds), num_bytes

    def edges_at(self, nodes: np.ndarray) -> list[int]:
        """Return the edges (by position) that have an end among some nodes (a mask)."""
        found = [each.edges[np.any([nodes[ends] for ends in each.ends], axis=0)] for each in self._alike]
        return sorted(number for each in found for number in each.tolist() if number >= 0)


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, edges between them, and the bytes that the chosen strategies may take together (None: any number)."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    budget: int | None = None

    is_sound: InitVar[bool] = False
    """True if all parts come from a checked problem, so that they are not checked again."""

    def __post_init__(self, is_sound: bool) -> None:
        if self.budget is not None and self.budget < 0:
            raise PlanError(f"the memory limit is {self.budget} bytes; give at least 0, or None for no limit.")
        if is_sound:
            return
        checked: set[tuple[int, int, int]] = set()  # arrays that nodes or edges share are looked at once
        for node in self.nodes:
            key = (id(node.seconds), id(node.num_bytes), 1)
            if key not in checked:
                node.check()
                checked.add(key)
        for edge in self.edges:
            key = (id(edge.seconds), id(edge.num_bytes), len(edge.ends))
            if key not in checked:
                edge.check()
                checked.add(key)
        sizes = [len(node.seconds) for node in self.nodes]
        for edge in self.edges:
            if min(edge.ends) < 0 or max(edge.ends) >= len(sizes):
                raise PlanError(f"{edge.where} leaves the problem; its nodes are 0 to {len(self.nodes) - 1}.")
            needed = tuple([sizes[end] for end in edge.ends])
            if edge.seconds.shape != needed:
                ends = " and ".join(repr(self.nodes[end].name) for end in edge.ends)
                raise PlanError(f"{edge.where} has seconds of shape {edge.seconds.shape}; {ends} need {needed}.")

    @property
    def forbidden_node(self) -> int | None:
        """The first node of which every strategy is forbidden; None where each has one that is allowed."""
        return next((i for i, node in enumerate(self.nodes) if not np.isfinite(node.seconds).any()), None)

    @property
    def largest_seconds(self) -> float:
        """Seconds that no choices take more than, but for forbidden ones."""
        parts = [each.seconds for each in (*self.nodes, *self.edges)]
        most = {id(each): float(np.max(each, where=np.isfinite(each), initial=0.0)) for each in _distinct_arrays(parts)}
        return sum(most[id(each)] for each in parts)

    def seconds_of(self, choices: Sequence[int]) -> float:
        """Return the objective at one choice per node; inf where something forbidden is chosen."""
        return self.cost_of(choices)[0]

    def bytes_of(self, choices: Sequence[int]) -> int:
        """Return the bytes of the chosen strategies together."""
        return self.cost_of(choices)[1]

    def cost_of(self, choices: Sequence[int]) -> tuple[float, int]:
        """Return the seconds and bytes at one choice per node."""
        assert len(choices) == len(self.nodes), f"{len(choices)} choices for {len(self.nodes)} nodes"
        seconds, (byte_arrays,) = self._parts.cost_of(choices)
        return seconds, byte_arrays

    @cached_property
    def _parts(self) -> Parts:
        return Parts((self,))

    def in_bytes(self) -> Problem:
        """Return the same question about bytes alone: they stand for the seconds (exact below 2**53), without a
        limit.
        """
        nodes = (
            Node(each.name, only_bytes(each.seconds, each.num_bytes), np.zeros_like(each.num_bytes))
            for each in self.nodes
        )
        shared: dict[tuple[int, int], Floats] = {}  # equal edges stay one array
        edges = []
        for each in self.edges:
            key = id(each.seconds), id(each.num_bytes)
            if key not in shared:
                shared[key] = only_bytes(each.seconds, each.num_bytes)
            edges.append(Edge(each.ends, shared[key]))
        return Problem(tuple(nodes), tuple(edges), is_sound=True)

    def fits(self, num_bytes: int) -> bool:
        """Return whether so many bytes are within the memory limit."""
        return self.budget is None or num_bytes <= self.budget


@dataclass(frozen=True, slots=True)
class Solution:
    """One choice per node, what it costs, and the certificate: no choice costs less than `bound` seconds."""

    choices: tuple[int, ...]
    seconds: float
    num_bytes: int
    bound: float
    solver: str
    """Method that produced it, for reports: "elimination", "messages", "prices + counts" or "ilp"."""
    multiplier: float = 0.0
    """The price of memory, in seconds per byte, at which one evaluation proves (most of) the bound."""

    def __post_init__(self) -> None:
        assert self.bound <= self.seconds, f"bound {self.bound} lies above the solution's {self.seconds} s"

    @property
    def gap(self) -> float:
        """Relative gap between the solution and its bound."""
        return 0.0 if self.seconds == self.bound else (self.seconds - self.bound) / abs(self.seconds or self.bound)


def only_bytes(seconds: Floats, num_bytes: Integers | None) -> Floats:
    """Return the bytes in the place of seconds: what is forbidden stays so; exact below 2**53 bytes."""
    return np.where(np.isfinite(seconds), 0 if num_bytes is None else num_bytes, np.inf)


def _check_costs(seconds: Floats, where: str) -> None:
    """Raise PlanError unless costs are finite, or inf where forbidden."""
    if seconds.dtype != np.float64:
        raise PlanError(f"{where} has seconds of type {seconds.dtype}; give float64.")
    if seconds.size and not seconds.min() > -np.inf:  # min is NaN when any entry is
        raise PlanError(f"{where} has seconds of NaN or -inf; seconds are finite, or inf where forbidden.")


def _distinct_arrays(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return each of the shared arrays once."""
    return list({id(each): each for each in arrays}.values())


def cut_table(table: Numbers, rows: Sequence[Integers]) -> Numbers:
    """Return `table[np.ix_(*rows)]` without the checks of `np.ix_`, which take longer than the rest."""
    if all(len(each) == size for each, size in zip(rows, table.shape, strict=True)):
        return table
    return table[tuple(each.reshape((-1,) + (1,) * (table.ndim - 1 - axis)) for axis, each in enumerate(rows))]  # type: ignore[return-value]
