"""The problem the planner solves, free of anything about tensors: menus of strategies, edges, a memory row.

    min  Σ_v seconds_v[x_v] + Σ_(u,v) seconds_uv[x_u, x_v]     over one choice x_v per node
    subject to  Σ_v bytes_v[x_v] + Σ_(u,v) bytes_uv[x_u, x_v] ≤ budget

A forbidden strategy or pair costs np.inf; a pin is a node in which all but some strategies are forbidden.
Arrays are kept as they are given (nodes and edges may share them) and must not be changed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    def __post_init__(self) -> None:
        seconds = _costs(self.seconds, self)
        if seconds.ndim != 1 or not len(seconds):
            raise PlanError(
                f"{self.where} has seconds of shape {seconds.shape}; give one number per strategy, at least one."
            )
        num_bytes = np.asarray(self.num_bytes)
        if num_bytes.shape != seconds.shape:
            raise PlanError(f"{self.where} has {len(seconds)} strategies but num_bytes of shape {num_bytes.shape}.")
        if not np.issubdtype(num_bytes.dtype, np.integer):
            raise PlanError(f"{self.where} has num_bytes of type {num_bytes.dtype}; bytes are whole numbers (int64).")
        if num_bytes.min() < 0:
            raise PlanError(
                f"{self.where} has {num_bytes.min()} bytes at strategy {num_bytes.argmin()}; the least is 0."
            )
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "num_bytes", num_bytes.astype(np.int64, copy=False))

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
        if len(self.ends) not in (2, 3) or (len(self.ends) == 3 and len(set(self.ends)) < 3):
            raise PlanError(f"{self.where} has {len(self.ends)} ends; give two, or three different ones.")
        seconds = _costs(self.seconds, self)
        if seconds.ndim != len(self.ends):
            raise PlanError(f"{self.where} has seconds of shape {seconds.shape}; give a dim per end, {len(self.ends)}.")
        object.__setattr__(self, "seconds", seconds)
        if self.num_bytes is None:
            return
        if self.num_bytes.shape != seconds.shape or not np.issubdtype(self.num_bytes.dtype, np.integer):
            raise PlanError(
                f"{self.where} has num_bytes of shape {self.num_bytes.shape} and type {self.num_bytes.dtype}; "
                f"give whole numbers in the shape of its seconds, {seconds.shape}."
            )
        if self.num_bytes.size and self.num_bytes.min() < 0:
            raise PlanError(f"{self.where} has {self.num_bytes.min()} bytes somewhere; the least is 0.")

    @property
    def where(self) -> str:
        return f"edge {' → '.join(map(str, self.ends))}"

    @property
    def is_loop(self) -> bool:
        return self.ends[0] == self.ends[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Nodes, edges between them, and the bytes that the chosen strategies may take together (None: any number)."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise PlanError(f"the memory limit is {self.budget} bytes; give at least 0, or None for no limit.")
        for edge in self.edges:
            if not all(0 <= end < len(self.nodes) for end in edge.ends):
                raise PlanError(f"{edge.where} leaves the problem; its nodes are 0 to {len(self.nodes) - 1}.")
            needed = tuple(self.nodes[end].num_strategies for end in edge.ends)
            if edge.seconds.shape != needed:
                ends = " and ".join(repr(self.nodes[end].name) for end in edge.ends)
                raise PlanError(f"{edge.where} has seconds of shape {edge.seconds.shape}; {ends} need {needed}.")

    def seconds_of(self, choices: Sequence[int]) -> float:
        """The objective at one choice per node; inf where something forbidden is chosen."""
        nodes = sum(float(node.seconds[choice]) for node, choice in zip(self.nodes, choices, strict=True))
        return nodes + sum(float(edge.seconds[tuple(choices[end] for end in edge.ends)]) for edge in self.edges)

    def bytes_of(self, choices: Sequence[int]) -> int:
        """Bytes of the chosen strategies together."""
        nodes = sum(int(node.num_bytes[choice]) for node, choice in zip(self.nodes, choices, strict=True))
        return nodes + sum(
            int(edge.num_bytes[tuple(choices[end] for end in edge.ends)])
            for edge in self.edges
            if edge.num_bytes is not None
        )

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
    """What produced it, for reports: "elimination", "multiplier + counts", "hubs", "ilp" …"""
    multiplier: float = 0.0
    """The price of memory, in seconds per byte, at which one evaluation proves (most of) the bound."""

    def __post_init__(self) -> None:
        assert self.bound <= self.seconds, f"bound {self.bound} lies above the solution's {self.seconds} s"

    @property
    def gap(self) -> float:
        """How far the solution may be from the optimum, as a share of its seconds."""
        return 0.0 if self.seconds == self.bound else (self.seconds - self.bound) / abs(self.seconds or self.bound)


def only_bytes(seconds: Floats, num_bytes: Integers | None) -> Floats:
    """Bytes in the place of seconds: what is forbidden stays so; exact below 2**53 bytes."""
    return np.where(np.isfinite(seconds), 0 if num_bytes is None else num_bytes, np.inf)


def _costs(seconds: Any, owner: Node | Edge) -> Floats:
    """An array of seconds: finite, or inf where forbidden."""
    array = np.asarray(seconds)
    if array.dtype != np.float64:  # else the same object, which equal edges share
        array = array.astype(np.float64)
    if array.size and not array.min() > -np.inf:  # min is NaN when any entry is
        raise PlanError(f"{owner.where} has seconds of NaN or -inf; seconds are finite, or inf where forbidden.")
    return array
