"""Pruning: forbidden strategies go, and so do edges to what is decided; the numbers of the nodes stay.

A node that is left with one strategy costs its neighbours a known time, and ties nothing together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.deadline import check_whole
from autopar.solver.problem import Edge, Integers, Node, Problem, cut_table


@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller problem, and which strategies of each node it kept."""

    problem: Problem
    kept: tuple[Integers, ...]

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the original problem from those of the smaller one."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.kept, choices, strict=True))

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the smaller problem from those of the original one, all of which it kept."""
        return tuple(int(np.searchsorted(kept, choice)) for kept, choice in zip(self.kept, choices, strict=True))


def prune_each(problems: Sequence[Problem]) -> list[Pruned]:
    """Drop forbidden strategies and the edges of decided nodes; every node must have a strategy that is allowed.

    The problems are one with a memory row each: they differ in bytes and budgets; equal parts are cut once.
    """
    first = problems[0]
    allowed = {id(node.seconds): node.seconds for node in first.nodes}
    rows_of = {key: np.flatnonzero(np.isfinite(seconds)) for key, seconds in allowed.items()}
    equal: dict[bytes, Integers] = {}  # equal rows are one array, so that what is cut by them is
    rows_of = {key: equal.setdefault(rows.tobytes(), rows) for key, rows in rows_of.items()}
    kept = tuple([rows_of[id(node.seconds)] for node in first.nodes])
    assert all(len(each) for each in rows_of.values()), "a node without an allowed strategy"
    shared: dict[object, np.ndarray] = {}  # equal candidate lists stay one array, and so do equal edges

    def cut(array: Any, rows: Sequence[Integers], is_loop: bool = False) -> Any:
        """Return the allowed part of a node's costs or a table, without the dims of decided ends."""
        key = (id(array), is_loop, *map(id, rows))
        if key not in shared:
            left = cut_table(array, rows)
            shape = tuple([len(each) for each in rows if len(each) > 1])
            shared[key] = left if is_loop or array.ndim == 1 else left.reshape(shape)
        return shared[key]

    seconds = [cut(node.seconds, (each,)) for node, each in zip(first.nodes, kept, strict=True)]
    num_bytes = [[cut(n.num_bytes, (each,)) for n, each in zip(p.nodes, kept, strict=True)] for p in problems]
    edges: list[list[Edge]] = [[] for _ in problems]
    for edge, *others in zip(*(each.edges for each in problems), strict=True):
        check_whole()
        rows = [kept[end] for end in edge.ends]
        open_ends = tuple([end for end, each in zip(edge.ends, rows, strict=True) if len(each) > 1])
        ends = edge.ends if edge.is_loop else open_ends
        cost = cut(edge.seconds, rows, edge.is_loop)
        edge_bytes = [
            None if each.num_bytes is None else cut(each.num_bytes, rows, edge.is_loop) for each in (edge, *others)
        ]
        if len(ends) > 1:
            for of_problem, each in zip(edges, edge_bytes, strict=True):
                of_problem.append(Edge(ends, cost, each))
            continue
        node = ends[0] if ends else edge.ends[0]
        seconds[node] = seconds[node] + cost
        for of_problem, each in zip(num_bytes, edge_bytes, strict=True):
            if each is not None:
                of_problem[node] = of_problem[node] + each
    found = []
    for problem, of_nodes, of_edges in zip(problems, num_bytes, edges, strict=True):
        nodes = tuple([Node(node.name, *each) for node, *each in zip(first.nodes, seconds, of_nodes, strict=True)])
        found.append(Pruned(Problem(nodes, tuple(of_edges), problem.budget, is_sound=True), kept))
    return found
