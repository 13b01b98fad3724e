"""The problem the planner solves, free of anything about tensors: menus of strategies, edges, a memory row.

    min  Σ_v seconds_v[x_v] + Σ_(u,v) seconds_uv[x_u, x_v]     over one choice x_v per node
    subject to  Σ_v bytes_v[x_v] + Σ_(u,v) bytes_uv[x_u, x_v] ≤ budget

A forbidden strategy or pair costs np.inf; a pin is a node in which all but some strategies are forbidden.
Arrays are kept as they are given (nodes and edges may share them), are checked when a problem is made of them, and
must not be changed afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Something to be decided: k strategies with their seconds[k] and num_bytes[k]."""

    name: str
    seconds: Floats
    num_bytes: Integers

    def check(self) -> None:
        """Raise PlanError where the arrays are no menu."""
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
    """What two or three nodes (by position) cost together: an array with a dim per end. Parallel edges add up.

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
    num_bytes: Integers | None
    ends: tuple[Integers, ...]
    edges: Integers
    """Which edges they are; for nodes negative."""

    def cost(self, choices: Integers, which: np.ndarray | slice = slice(None)) -> tuple[list[float], int]:
        """Seconds of each, and bytes of all, at one choice per node of the problem."""
        index = tuple([choices[ends[which]] for ends in self.ends])
        held = 0 if self.num_bytes is None else int(self.num_bytes[index].sum())
        return self.seconds[index].tolist(), held

    def held(self, choices: Integers) -> int:
        """Bytes of all at one choice per node of the problem."""
        if self.num_bytes is None:
            return 0
        return int(self.num_bytes[tuple([choices[ends] for ends in self.ends])].sum())


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, edges between them, and the bytes that the chosen strategies may take together (None: any number)."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise PlanError(f"the memory limit is {self.budget} bytes; give at least 0, or None for no limit.")
        checked: set[tuple[int, int, int]] = set()  # arrays that nodes or edges share are looked at once
        for part in (*self.nodes, *self.edges):
            ends = len(part.ends) if isinstance(part, Edge) else 1
            key = (id(part.seconds), id(part.num_bytes), ends)
            if key not in checked:
                part.check()
                checked.add(key)
        sizes = [len(node.seconds) for node in self.nodes]
        for edge in self.edges:
            if not all(0 <= end < len(sizes) for end in edge.ends):
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
    def dearest(self) -> float:
        """Seconds that no choices take more than, but for forbidden ones."""
        parts = [each.seconds for each in (*self.nodes, *self.edges)]
        most = {id(each): float(np.max(each, where=np.isfinite(each), initial=0.0)) for each in _once(parts)}
        return sum(most[id(each)] for each in parts)

    def seconds_of(self, choices: Sequence[int]) -> float:
        """The objective at one choice per node; inf where something forbidden is chosen."""
        return self.cost_of(choices)[0]

    def bytes_of(self, choices: Sequence[int]) -> int:
        """Bytes of the chosen strategies together."""
        chosen = np.array(choices, dtype=np.intp)
        return sum(each.held(chosen) for each in self._alike)

    def cost_of(self, choices: Sequence[int], among: np.ndarray | None = None) -> tuple[float, int]:
        """Seconds and bytes at one choice per node: of all, or of some nodes (a mask) and the edges among these."""
        assert len(choices) == len(self.nodes), f"{len(choices)} choices for {len(self.nodes)} nodes"
        chosen = np.array(choices, dtype=np.intp)
        costs = [
            each.cost(chosen, slice(None) if among is None else np.all([among[ends] for ends in each.ends], axis=0))
            for each in self._alike
        ]
        return math.fsum(itertools.chain.from_iterable(seconds for seconds, _ in costs)), sum(held for _, held in costs)

    def edges_at(self, nodes: np.ndarray) -> list[int]:
        """The edges (by position) that have an end among some nodes (a mask)."""
        found = [each.edges[np.any([nodes[ends] for ends in each.ends], axis=0)] for each in self._alike]
        return sorted(number for each in found for number in each.tolist() if number >= 0)

    @cached_property
    def _alike(self) -> tuple[_Alike, ...]:
        ends: dict[tuple[int, int, int], list[tuple[int, ...]]] = defaultdict(list)
        edges: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        arrays: dict[tuple[int, int, int], tuple[Floats, Integers | None]] = {}
        for number, part in enumerate((*self.nodes, *self.edges), start=-len(self.nodes)):
            where = part.ends if isinstance(part, Edge) else (number + len(self.nodes),)
            key = id(part.seconds), id(part.num_bytes), len(where)
            ends[key].append(where)
            edges[key].append(number)
            arrays[key] = part.seconds, part.num_bytes
        return tuple(_Alike(*arrays[key], tuple(np.array(each).T), np.array(edges[key])) for key, each in ends.items())

    def in_bytes(self) -> Problem:
        """The same question about bytes alone: they stand for the seconds (exact below 2**53), without a limit."""
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
        return Problem(tuple(nodes), tuple(edges))

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes are within the memory limit."""
        return self.budget is None or num_bytes <= self.budget


@dataclass(frozen=True, slots=True)
class Solution:
    """One choice per node, what it costs, and the certificate: no choice costs less than `bound` seconds."""

    choices: tuple[int, ...]
    seconds: float
    num_bytes: int
    bound: float
    solver: str
    """What produced it, for reports: "elimination", "multiplier + counts", "relaxation", "ilp" …"""
    multiplier: float = 0.0
    """The price of memory, in seconds per byte, at which one evaluation proves (most of) the bound."""
    smaller: tuple[tuple[int, ...], ...] = ()
    """Other choices that fit and cost little more, each of fewer bytes than the one before; of some solvers alone."""

    def __post_init__(self) -> None:
        assert self.bound <= self.seconds, f"bound {self.bound} lies above the solution's {self.seconds} s"

    @property
    def gap(self) -> float:
        """How far the solution may be from the optimum, as a share of its seconds."""
        return 0.0 if self.seconds == self.bound else (self.seconds - self.bound) / abs(self.seconds or self.bound)


def only_bytes(seconds: Floats, num_bytes: Integers | None) -> Floats:
    """Bytes in the place of seconds: what is forbidden stays so; exact below 2**53 bytes."""
    return np.where(np.isfinite(seconds), 0 if num_bytes is None else num_bytes, np.inf)


def _check_costs(seconds: Floats, where: str) -> None:
    """Costs are finite, or inf where forbidden."""
    if seconds.dtype != np.float64:
        raise PlanError(f"{where} has seconds of type {seconds.dtype}; give float64.")
    if seconds.size and not seconds.min() > -np.inf:  # min is NaN when any entry is
        raise PlanError(f"{where} has seconds of NaN or -inf; seconds are finite, or inf where forbidden.")


def _once(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each array once that some parts share."""
    return list({id(each): each for each in arrays}.values())
