"""Exact reductions: a smaller problem with the same optimum, and the way back.

A node whose allowed strategies all take the same bytes can be minimised out without the memory row noticing. With one
neighbour it leaves costs on that neighbour, with two an edge between them; with a single allowed strategy it leaves
costs on any number of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem import Edge, Floats, Node, Problem


@dataclass(frozen=True, slots=True, eq=False)
class _Removed:
    """A node minimised out: its costs, and its edges as (neighbour, seconds[k_node, k_neighbour])."""

    node: int
    seconds: Floats
    edges: tuple[tuple[int, Floats], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """The smaller problem, the seconds it leaves out, and what is needed to extend its solutions."""

    problem: Problem
    constant: float
    kept: tuple[int, ...]
    """Position in the original problem of each node of the smaller one."""
    strategies: tuple[np.ndarray, ...]
    """Position in the original menu of each strategy of each kept node: forbidden ones are gone."""
    removed: tuple[_Removed, ...]

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """A solution of the original problem, equally good, from one of the smaller problem."""
        found = {node: int(self.strategies[i][choices[i]]) for i, node in enumerate(self.kept)}
        for each in reversed(self.removed):
            row = each.seconds
            for neighbour, seconds in each.edges:
                row = row + seconds[:, found[neighbour]]
            found[each.node] = int(np.argmin(row))
        return tuple(found[node] for node in range(len(found)))

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...] | None:
        """The part of a solution of the original problem that the smaller one decides, if it still allows it."""
        found = []
        for node, strategies in zip(self.kept, self.strategies, strict=True):
            place = int(np.searchsorted(strategies, choices[node]))
            if place == len(strategies) or strategies[place] != choices[node]:
                return None
            found.append(place)
        return tuple(found)


def reduce_problem(problem: Problem) -> Reduction:
    """Minimise out whatever can be without growing the problem."""
    state = _State(problem)
    waiting = list(range(len(problem.nodes)))
    queued = set(waiting)
    while waiting:
        node = waiting.pop()
        queued.discard(node)
        if node in state.around and state.removable(node):
            touched = state.remove(node)
            new = [other for other in touched if other not in queued]
            waiting.extend(new)
            queued.update(new)
    return state.result()


class _State:
    """A problem being reduced: costs per node, and one merged edge per pair of neighbours."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.seconds = [node.seconds for node in problem.nodes]
        self.around: dict[int, dict[int, Floats]] = {node: {} for node in range(len(problem.nodes))}
        self.removed: list[_Removed] = []
        self.constant = 0.0
        self.num_bytes = 0
        for edge in problem.edges:
            if edge.source == edge.target:
                self.seconds[edge.source] = self.seconds[edge.source] + np.diagonal(edge.seconds)
            else:
                self._connect(edge.source, edge.target, edge.seconds)

    def removable(self, node: int) -> bool:
        allowed = np.isfinite(self.seconds[node])
        num_bytes = self.problem.nodes[node].num_bytes[allowed]
        same_bytes = self.problem.budget is None or (len(num_bytes) > 0 and num_bytes.min() == num_bytes.max())
        return same_bytes and (len(self.around[node]) <= 2 or len(num_bytes) == 1)

    def remove(self, node: int) -> tuple[int, ...]:
        """Minimise a node out and return the neighbours it had."""
        edges = tuple(sorted(self.around.pop(node).items(), key=lambda entry: entry[0]))
        for neighbour, _ in edges:
            del self.around[neighbour][node]
        seconds = self.seconds[node]
        allowed = np.flatnonzero(np.isfinite(seconds))
        if self.problem.budget is not None:
            self.num_bytes += int(self.problem.nodes[node].num_bytes[allowed[0]])
        self.removed.append(_Removed(node, seconds, edges))
        if len(allowed) == 1:
            self.constant += float(seconds[allowed[0]])
            for neighbour, matrix in edges:
                self.seconds[neighbour] = self.seconds[neighbour] + matrix[allowed[0]]
        elif not edges:
            self.constant += float(seconds.min())
        elif len(edges) == 1:
            ((neighbour, matrix),) = edges
            self.seconds[neighbour] = self.seconds[neighbour] + (seconds[:, None] + matrix).min(axis=0)
        else:
            (one, left), (other, right) = edges
            left = left + seconds[:, None]
            rows = [(left[:, i, None] + right).min(axis=0) for i in range(left.shape[1])]
            self._connect(one, other, np.stack(rows))
        return tuple(neighbour for neighbour, _ in edges)

    def result(self) -> Reduction:
        kept = tuple(self.around)
        index = {node: place for place, node in enumerate(kept)}
        strategies = tuple(np.flatnonzero(np.isfinite(self.seconds[node])) for node in kept)
        # A node with nothing left keeps one forbidden strategy, so that the smaller problem is infeasible too.
        strategies = tuple(each if len(each) else np.zeros(1, dtype=np.intp) for each in strategies)
        nodes = tuple(
            Node(self.problem.nodes[node].name, self.seconds[node][rows], self.problem.nodes[node].num_bytes[rows])
            for node, rows in zip(kept, strategies, strict=True)
        )
        edges = tuple(
            Edge(index[one], index[other], matrix[np.ix_(strategies[index[one]], strategies[index[other]])])
            for one in kept
            for other, matrix in self.around[one].items()
            if one < other
        )
        budget = None if self.problem.budget is None else self.problem.budget - self.num_bytes
        return Reduction(_limited(nodes, edges, budget), self.constant, kept, strategies, tuple(self.removed))

    def _connect(self, one: int, other: int, matrix: Floats) -> None:
        """Add an edge's matrix[k_one, k_other] to what lies between the two; seen from both sides."""
        if other in self.around[one]:
            matrix = self.around[one][other] + matrix
        self.around[one][other] = matrix
        self.around[other][one] = matrix.T


def _limited(nodes: tuple[Node, ...], edges: tuple[Edge, ...], budget: int | None) -> Problem:
    """A problem whose limit the nodes left out may already exceed: then nothing is allowed."""
    if budget is not None and budget < 0:
        blocked = Node("limit", np.array([np.inf]), np.zeros(1, dtype=np.int64))
        return Problem((*nodes, blocked), edges, 0)
    return Problem(nodes, edges, budget)
