"""The problem the planner solves, free of anything about tensors: menus of strategies, edges, a memory row.

    min  Σ_v seconds_v[x_v] + Σ_(u,v) seconds_uv[x_u, x_v]     over one choice x_v per node
    subject to  Σ_v bytes_v[x_v] ≤ budget

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
        where = f"node {self.name!r}"
        seconds = _costs(self.seconds, where)
        if seconds.ndim != 1 or not len(seconds):
            raise PlanError(
                f"{where} has seconds of shape {seconds.shape}; give one number per strategy, at least one."
            )
        num_bytes = np.asarray(self.num_bytes)
        if num_bytes.shape != seconds.shape:
            raise PlanError(f"{where} has {len(seconds)} strategies but num_bytes of shape {num_bytes.shape}.")
        if not np.issubdtype(num_bytes.dtype, np.integer):
            raise PlanError(f"{where} has num_bytes of type {num_bytes.dtype}; bytes are whole numbers (int64).")
        if num_bytes.min() < 0:
            raise PlanError(f"{where} has {num_bytes.min()} bytes at strategy {num_bytes.argmin()}; the least is 0.")
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "num_bytes", num_bytes.astype(np.int64, copy=False))

    @property
    def num_strategies(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """What two nodes (by position) cost together: seconds[k_source, k_target]. Parallel edges add up."""

    source: int
    target: int
    seconds: Floats

    def __post_init__(self) -> None:
        where = f"edge {self.source} → {self.target}"
        seconds = _costs(self.seconds, where)
        if seconds.ndim != 2:
            raise PlanError(f"{where} has seconds of shape {seconds.shape}; give one row per strategy of its source.")
        object.__setattr__(self, "seconds", seconds)


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
            where = f"edge {edge.source} → {edge.target}"
            if not (0 <= edge.source < len(self.nodes) and 0 <= edge.target < len(self.nodes)):
                raise PlanError(f"{where} leaves the problem; its nodes are 0 to {len(self.nodes) - 1}.")
            needed = (self.nodes[edge.source].num_strategies, self.nodes[edge.target].num_strategies)
            if edge.seconds.shape != needed:
                ends = f"{self.nodes[edge.source].name!r} and {self.nodes[edge.target].name!r}"
                raise PlanError(f"{where} has seconds of shape {edge.seconds.shape}; {ends} need {needed}.")

    def seconds_of(self, choices: Sequence[int]) -> float:
        """The objective at one choice per node; inf where something forbidden is chosen."""
        nodes = sum(float(node.seconds[choice]) for node, choice in zip(self.nodes, choices, strict=True))
        return nodes + sum(float(edge.seconds[choices[edge.source], choices[edge.target]]) for edge in self.edges)

    def bytes_of(self, choices: Sequence[int]) -> int:
        """Bytes of the chosen strategies together."""
        return sum(int(node.num_bytes[choice]) for node, choice in zip(self.nodes, choices, strict=True))

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
    """What produced it, for reports: "elimination", "multiplier", "multiplier + ilp", "ilp" …"""

    def __post_init__(self) -> None:
        assert self.bound <= self.seconds, f"bound {self.bound} lies above the solution's {self.seconds} s"

    @property
    def gap(self) -> float:
        """How far the solution may be from the optimum, as a share of its seconds."""
        return 0.0 if self.seconds == self.bound else (self.seconds - self.bound) / abs(self.seconds or self.bound)


def format_bytes(num_bytes: int) -> str:
    """Bytes for people.

    >>> format_bytes(3 << 29)
    '1.50 GiB'
    """
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.2f} {unit}"


def _costs(seconds: Any, where: str) -> Floats:
    """An array of seconds: finite, or inf where forbidden."""
    array = np.asarray(seconds, dtype=np.float64)
    if array.size and not array.min() > -np.inf:  # min is NaN when any entry is
        raise PlanError(f"{where} has seconds of NaN or -inf; seconds are finite, or inf where forbidden.")
    return array
