"""Two nodes that hardly leave each other a choice become one, whose strategies are their allowed pairs.

Where edges forbid nearly every pair of two nodes (both ends of an expert dispatch make the same choice), elimination
would still build tables over all pairs, and over the pairs of their neighbours. One node in their place has few
strategies more than the larger of the two, and lowers the treewidth. Edges to others are indexed anew; what both have
to the same other is two parallel edges.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.solver.deadline import check_whole
from autopar.solver.problem import Edge, Integers, Node, Problem

GROWTH = 4  # largest number of allowed pairs, as a multiple of the strategies of the larger of the two nodes
SMALL = 4096  # pairs: tables of no more cost nothing


@dataclass(frozen=True, slots=True, eq=False)
class Contracted:
    """The problem with fewer nodes, and for each of these the nodes that it stands for, with their strategies."""

    problem: Problem
    members: tuple[dict[int, Integers], ...]

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the original problem from those of the smaller one."""
        if sum(map(len, self.members)) == len(choices):
            return tuple(choices)  # no two nodes were joined
        found = {
            node: int(strategies[choice])
            for choice, members in zip(choices, self.members, strict=True)
            for node, strategies in members.items()
        }
        return tuple(found[node] for node in range(len(found)))

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the smaller problem from those of the original one, none of whose pairs may be
        forbidden.
        """
        if len(self.members) == len(choices):
            return tuple(choices)  # no two nodes were joined
        found = []
        for members in self.members:
            same = [strategies == choices[node] for node, strategies in members.items()]
            found.append(int(np.flatnonzero(np.all(same, axis=0))[0]))
        return tuple(found)


def contract(problem: Problem) -> Contracted:
    """Join pairs of nodes, largest first, until none is left that hardly leaves a choice."""
    state = _State(problem)
    if not state.join_some():
        return Contracted(problem, tuple(state.members.values()))
    while state.join_some():
        pass
    return state.result()


def contract_each(problems: Sequence[Problem]) -> list[Contracted]:
    """Return the same of one problem with a memory row each: they differ in bytes and budgets, of which nothing
    depends.
    """
    first = contract(problems[0])
    if len(first.members) == len(problems[0].nodes):
        return [first, *(Contracted(each, first.members) for each in problems[1:])]
    return [first, *map(contract, problems[1:])]


class _State:
    """Problem during contraction; equal layers share arrays, and equal inputs are processed once."""

    def __init__(self, problem: Problem) -> None:
        self.budget = problem.budget
        self.nodes: dict[int, Node] = dict(enumerate(problem.nodes))
        every = {node.num_strategies: np.arange(node.num_strategies) for node in problem.nodes}
        self.members = {node: {node: every[each.num_strategies]} for node, each in self.nodes.items()}
        self.edges: dict[int, Edge] = dict(enumerate(problem.edges))
        self.made: dict[object, object] = {}

    @cached_property
    def at(self) -> dict[int, set[int]]:
        """Node → its edges."""
        found: dict[int, set[int]] = {node: set() for node in self.nodes}
        for number, edge in self.edges.items():
            for end in edge.ends:
                found[end].add(number)
        return found

    def join_some(self) -> bool:
        """Join pairs that have no node in common; False where there is none."""
        joined: set[int] = set()
        for (one, other), edges in sorted(self._edges_by_ends().items(), key=self._size):
            if not joined & {one, other}:
                pairs = self._pairs(one, other, edges)
                if pairs is not None:
                    self._join(one, other, pairs)
                    joined |= {one, other}
        return bool(joined)

    def _size(self, entry: tuple[tuple[int, int], list[int]]) -> tuple[int, tuple[int, int]]:
        ends = entry[0]
        return -math.prod(self.nodes[end].num_strategies for end in ends), ends

    def _edges_by_ends(self) -> dict[tuple[int, int], list[int]]:
        """Group edges between nodes with many strategies by their ends."""
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, edge in self.edges.items():
            if len(edge.ends) == 2 and not edge.is_loop and edge.seconds.size > SMALL:
                found[tuple(sorted(edge.ends))].append(number)  # type: ignore[index]
        return found

    def _pairs(self, one: int, other: int, edges: list[int]) -> tuple[Integers, Integers] | None:
        tables = [(self.edges[number].seconds, self.edges[number].ends[0] == one) for number in edges]
        key = (
            "pairs",
            id(self.nodes[one].seconds),
            id(self.nodes[other].seconds),
            *((id(t), first) for t, first in tables),
        )
        if key not in self.made:
            allowed = np.isfinite(self.nodes[one].seconds)[:, None] & np.isfinite(self.nodes[other].seconds)[None, :]
            for table, first in tables:
                allowed = allowed & np.isfinite(table if first else table.T)
            most = GROWTH * max(allowed.shape)
            # The tables are kept with what was made of them: an id means something only while the object lives.
            self.made[key] = (np.nonzero(allowed) if 0 < allowed.sum() <= most else None, tables)
        return self.made[key][0]  # type: ignore[index, return-value]

    def _join(self, one: int, other: int, pairs: tuple[Integers, Integers]) -> None:
        check_whole()
        rows = dict(zip((one, other), pairs, strict=True))
        between = [n for n in sorted(self.at[one] | self.at[other]) if set(self.edges[n].ends) <= rows.keys()]
        nodes = self.nodes[one], self.nodes[other]
        edges = [self.edges.pop(number) for number in between]
        self.nodes[one] = self._joined(nodes, edges, rows, pairs)
        del self.nodes[other]
        self.at[one] = (self.at[one] | self.at.pop(other)).difference(between)
        of_other = self.members.pop(other)
        self.members[one] = {
            **{node: strategies[pairs[0]] for node, strategies in self.members[one].items()},
            **{node: strategies[pairs[1]] for node, strategies in of_other.items()},
        }
        for number in sorted(self.at[one]):
            self.edges[number] = self._indexed(self.edges[number], rows, one)

    def _joined(
        self, nodes: tuple[Node, Node], edges: list[Edge], rows: dict[int, Integers], pairs: tuple[Integers, Integers]
    ) -> Node:
        parts = tuple((id(each.seconds), id(each.num_bytes)) for each in (*nodes, *edges))
        places = tuple(tuple(list(rows).index(end) for end in edge.ends) for edge in edges)
        key = "node", id(pairs), parts, places
        if key not in self.made:
            seconds = sum(node.seconds[each] for node, each in zip(nodes, pairs, strict=True))
            byte_arrays = sum(node.num_bytes[each] for node, each in zip(nodes, pairs, strict=True))
            for edge in edges:
                index = tuple(rows[end] for end in edge.ends)
                seconds = seconds + edge.seconds[index]
                byte_arrays = byte_arrays if edge.num_bytes is None else byte_arrays + edge.num_bytes[index]
            self.made[key] = seconds, byte_arrays, (nodes, edges, pairs)
        seconds, byte_arrays, _ = self.made[key]  # type: ignore[misc]
        return Node(f"{nodes[0].name} & {nodes[1].name}", seconds, byte_arrays)

    def _indexed(self, edge: Edge, rows: dict[int, Integers], joined: int) -> Edge:
        """Return an edge to one of two nodes, or to both, as one to what they have become."""
        at = tuple(end if end in rows else None for end in edge.ends)
        ids = tuple(None if end is None else id(rows[end]) for end in at)
        key = "edge", id(edge.seconds), id(edge.num_bytes), ids
        if key not in self.made:
            tables = (edge.seconds, edge.num_bytes)
            self.made[key] = (*(None if each is None else _taken(each, at, rows) for each in tables), (edge, rows))
        seconds, byte_arrays, _ = self.made[key]  # type: ignore[misc]
        ends = tuple(dict.fromkeys(joined if end in rows else end for end in edge.ends))
        if len(edge.ends) == 2:
            return Edge((joined, joined) if len(ends) == 1 else ends, seconds, byte_arrays)
        return Edge(ends, seconds, byte_arrays)

    def result(self) -> Contracted:
        index = {node: place for place, node in enumerate(self.nodes)}
        edges = (
            Edge(tuple(index[end] for end in edge.ends), edge.seconds, edge.num_bytes) for edge in self.edges.values()
        )
        problem = Problem(tuple(self.nodes.values()), tuple(edges), self.budget, is_sound=True)
        return Contracted(problem, tuple(self.members[node] for node in self.nodes))


def _taken(table: np.ndarray, at: Sequence[int | None], rows: dict[int, Integers]) -> np.ndarray:
    """Return the rows of pairs along the dims of the two nodes; one dim in their place where a table of three has
    both.
    """
    dims = [dim for dim, end in enumerate(at) if end is not None]
    if len(dims) == 1 or table.ndim == 2:
        for dim in dims:
            table = np.take(table, rows[at[dim]], axis=dim)  # type: ignore[index]
        return table
    first, second = dims
    moved = np.moveaxis(table, (first, second), (0, 1))
    taken = moved[rows[at[first]], rows[at[second]]]  # type: ignore[index]
    return np.moveaxis(taken, 0, first)
