"""What can be left out of a problem before it is solved: strategies that are forbidden, edges to what is decided.

A node that is left with one strategy is decided: its edges cost its neighbours a known time, and tie nothing together.
Both steps are exact, and keep the numbers of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autopar.solver.problem import Edge, Floats, Integers, Node, Problem

Numbers = TypeVar("Numbers", Floats, Integers)


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
    allowed = {id(node.seconds): node.seconds for node in problem.nodes}
    rows_of = {key: np.flatnonzero(np.isfinite(seconds)) for key, seconds in allowed.items()}
    kept = tuple([rows_of[id(node.seconds)] for node in problem.nodes])
    assert all(len(each) for each in rows_of.values()), "a node without an allowed strategy"
    menus: dict[tuple[int, int], tuple[Floats, Integers]] = {}  # equal menus stay one array, and so do equal edges
    for node, each in zip(problem.nodes, kept, strict=True):
        if (id(node.seconds), id(node.num_bytes)) not in menus:
            cut = cut_table(node.seconds, (each,)), cut_table(node.num_bytes, (each,))
            menus[id(node.seconds), id(node.num_bytes)] = cut
    seconds = [menus[id(node.seconds), id(node.num_bytes)][0] for node in problem.nodes]
    num_bytes = [menus[id(node.seconds), id(node.num_bytes)][1] for node in problem.nodes]
    edges: list[Edge] = []
    matrices: dict[object, tuple[Floats, Integers | None]] = {}
    for edge in problem.edges:
        rows = tuple([kept[end] for end in edge.ends])
        key = (id(edge.seconds), id(edge.num_bytes), *map(id, rows))
        if key not in matrices:
            held = None if edge.num_bytes is None else cut_table(edge.num_bytes, rows)
            matrices[key] = cut_table(edge.seconds, rows), held
        open_ends = tuple([end for end, each in zip(edge.ends, rows, strict=True) if len(each) > 1])
        if edge.is_loop or len(open_ends) == len(edge.ends):
            edges.append(Edge(edge.ends, *matrices[key]))
            continue
        shape = tuple(len(each) for each in rows if len(each) > 1)
        folded = (key, "folded")
        if folded not in matrices:
            matrices[folded] = tuple(None if each is None else each.reshape(shape) for each in matrices[key])  # type: ignore[assignment]
        cost, held = matrices[folded]
        if len(open_ends) > 1:
            edges.append(Edge(open_ends, cost, held))
            continue
        node = open_ends[0] if open_ends else edge.ends[0]
        seconds[node] = seconds[node] + cost
        if held is not None:
            num_bytes[node] = num_bytes[node] + held
    nodes = tuple(
        Node(node.name, cost, held) for node, cost, held in zip(problem.nodes, seconds, num_bytes, strict=True)
    )
    return Pruned(Problem(nodes, tuple(edges), problem.budget), kept)


def cut_table(table: Numbers, rows: Sequence[Integers]) -> Numbers:
    """`table[np.ix_(*rows)]` without the checks of `np.ix_`, which take longer than the rest."""
    if all(len(each) == size for each, size in zip(rows, table.shape, strict=True)):
        return table
    return table[tuple(each.reshape((-1,) + (1,) * (table.ndim - 1 - axis)) for axis, each in enumerate(rows))]  # type: ignore[return-value]


def with_fixed(problem: Problem, choices: Mapping[int, int]) -> Problem:
    """The problem with some nodes held at a strategy; -1 is the first that is allowed."""
    nodes = list(problem.nodes)
    for number, choice in choices.items():
        node = nodes[number]
        held = choice if choice >= 0 else int(np.flatnonzero(np.isfinite(node.seconds))[0])
        seconds = np.where(np.arange(node.num_strategies) == held, node.seconds, np.inf)
        nodes[number] = Node(node.name, seconds, node.num_bytes)
    return Problem(tuple(nodes), problem.edges, problem.budget)
