"""What can be left out of a problem before it is solved: strategies that are forbidden, edges to what is decided.

A node that is left with one strategy is decided: its edges cost its neighbours a known time, and tie nothing together.
Both steps are exact, and keep the numbers of the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem import Edge, Floats, Integers, Node, Problem


@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller problem, and which strategies of each node it kept."""

    problem: Problem
    kept: tuple[Integers, ...]

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the original problem from those of the smaller one."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.kept, choices, strict=True))


def prune(problem: Problem) -> Pruned:
    """Drop forbidden strategies and the edges of decided nodes; every node must have a strategy that is allowed."""
    kept = tuple(np.flatnonzero(np.isfinite(node.seconds)) for node in problem.nodes)
    assert all(len(each) for each in kept), "a node without an allowed strategy"
    seconds = [node.seconds[each] for node, each in zip(problem.nodes, kept, strict=True)]
    edges: list[Edge] = []
    matrices: dict[object, Floats] = {}  # equal edges stay one array
    for edge in problem.edges:
        rows, columns = kept[edge.source], kept[edge.target]
        key = (id(edge.seconds), rows.tobytes(), columns.tobytes())
        if key not in matrices:
            matrices[key] = edge.seconds[np.ix_(rows, columns)]
        matrix = matrices[key]
        if edge.source != edge.target and len(rows) == 1:
            seconds[edge.target] = seconds[edge.target] + matrix[0]
        elif edge.source != edge.target and len(columns) == 1:
            seconds[edge.source] = seconds[edge.source] + matrix[:, 0]
        else:
            edges.append(Edge(edge.source, edge.target, matrix))
    nodes = tuple(
        Node(node.name, cost, node.num_bytes[each])
        for node, cost, each in zip(problem.nodes, seconds, kept, strict=True)
    )
    return Pruned(Problem(nodes, tuple(edges), problem.budget), kept)
