"""Reduced-cost fixing: strategies that no good choice takes are dropped; nodes left with one strategy are decided.

A strategy whose reduced cost (`min_marginals`) exceeds the allowed gap above the bound is in no solution within the
gap. This decides most nodes; a small problem over the others remains, plus a constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.deadline import check_whole
from autopar.solver.elimination.min_marginals import ReducedCosts
from autopar.solver.problem import Edge, Floats, Integers, Node, Parts, Problem, cut_table


@dataclass(frozen=True, slots=True)
class Remaining:
    """The problem over the nodes that are not decided, the seconds of the rest, and the way back."""

    problem: Problem
    constant: float
    """Infinite where what is decided exceeds the memory limit, and where a node is left with nothing."""
    kept: tuple[Integers, ...]
    """Strategies that each node of the original problem is left with."""
    undecided: tuple[int, ...]
    """Position in the original problem of each node of the smaller one."""

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the original problem from those of the smaller one."""
        found = [int(kept[0]) for kept in self.kept]
        for node, choice in zip(self.undecided, choices, strict=True):
            found[node] = int(self.kept[node][choice])
        return tuple(found)

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the smaller problem from those of the original one, which are to be among what is
        left.
        """
        return tuple([int(np.searchsorted(self.kept[node], choices[node])) for node in self.undecided])


def only(problem: Problem, kept: Iterable[Integers]) -> ReducedCosts:
    """Return -inf for the strategies of each node that are kept, else inf; of pairs nothing is known."""
    of_node, alive, every = [], [], dict[int, Integers]()
    masks: dict[bytes, Floats] = {}  # equal nodes keep equal masks
    for node, left in zip(problem.nodes, kept, strict=True):
        reduced_cost = np.full(node.num_strategies, np.inf)
        reduced_cost[left] = -np.inf
        of_node.append(masks.setdefault(reduced_cost.tobytes(), reduced_cost))
        alive.append(every.setdefault(node.num_strategies, np.arange(node.num_strategies)))
    shapes = [edge.seconds.shape for edge in problem.edges]
    shared = {shape: np.broadcast_to(-np.inf, shape) for shape in set(shapes)}
    return ReducedCosts(tuple(alive), tuple(of_node), tuple([shared[shape] for shape in shapes]))


def remaining_of_each(
    problems: Sequence[Problem], found: ReducedCosts, limit: float, parts: Parts | None = None
) -> list[Remaining]:
    """Return problems without the strategies and pairs whose reduced cost is above `limit` seconds.

    They are one problem with a memory row each: they differ in bytes and budgets, and equal parts are cut once. `parts`
    are those of the problems, where they are known.
    """
    rows, first, parts = _rows(found, limit), problems[0], parts or Parts(problems)
    kept = tuple([each for _, each in rows])
    if not all(map(len, kept)):
        return [Remaining(Problem((), (), each.budget), math.inf, kept, ()) for each in problems]
    decided = np.array([len(each) == 1 for each in kept], dtype=bool)
    undecided = np.flatnonzero(~decided).tolist()
    place = {node: number for number, node in enumerate(undecided)}
    tables = [_tables_left(each, kept, undecided) for each in problems]
    edges: list[list[Edge]] = [[] for _ in problems]
    pairs: dict[object, tuple[Floats, list[Integers | None]]] = {}  # equal edges stay one array
    for number in parts.edges_at(~decided):
        check_whole()
        edge, reduced_cost = first.edges[number], found.of_edge[number]
        edge_bytes = [each.edges[number].num_bytes for each in problems]
        ends = [rows[end] for end in edge.ends]
        key = (id(edge.seconds), id(reduced_cost), *map(id, edge_bytes), *[id(each) for _, each in ends])
        if key not in pairs:
            pairs[key] = _restricted(edge, edge_bytes, reduced_cost, ends, limit)
        cost, restricted = pairs[key]
        left = [end for end in edge.ends if end in place]
        if len(left) > 1:
            places = tuple([place[end] for end in left])
            for of_problem, each in zip(edges, restricted, strict=True):
                of_problem.append(Edge(places, cost, each))
            continue
        node = left[0]
        for (seconds, num_bytes), each in zip(tables, restricted, strict=True):
            seconds[node] = seconds[node] + cost
            if each is not None:
                num_bytes[node] = num_bytes[node] + each
    constant, taken = parts.cost_of([int(each[0]) for each in kept], among=decided)
    left_of: list[Remaining] = []
    for problem, (seconds, num_bytes), of_problem, of_decided in zip(problems, tables, edges, taken, strict=True):
        nodes = tuple([Node(problem.nodes[node].name, seconds[node], num_bytes[node]) for node in undecided])
        budget = None if problem.budget is None else problem.budget - of_decided
        fits = budget is None or budget >= 0
        left = Problem(nodes, tuple(of_problem), budget if fits else 0, is_sound=True)
        left_of.append(Remaining(left, constant if fits else math.inf, kept, tuple(undecided)))
    return left_of


def _rows(found: ReducedCosts, limit: float) -> list[tuple[Integers, Integers]]:
    """Return the strategies of each node below the limit: their positions among the alive ones, and among all."""
    shared: dict[tuple[int, int], tuple[Integers, Integers]] = {}
    for reduced_cost, alive in zip(found.of_node, found.alive, strict=True):
        if (id(reduced_cost), id(alive)) not in shared:
            near = np.flatnonzero(reduced_cost[alive] <= limit)
            shared[id(reduced_cost), id(alive)] = near, alive[near]
    return [shared[id(reduced_cost), id(alive)] for reduced_cost, alive in zip(found.of_node, found.alive, strict=True)]


def _tables_left(
    problem: Problem, kept: Sequence[Integers], nodes: Sequence[int]
) -> tuple[dict[int, Floats], dict[int, Integers]]:
    """Return seconds and bytes of some nodes over their remaining strategies; equal candidate lists stay one array."""
    shared: dict[tuple[int, int], Floats | Integers] = {}

    def restricted(array: Floats | Integers, node: int) -> Any:
        key = id(array), id(kept[node])
        if key not in shared:
            shared[key] = array[kept[node]]
        return shared[key]

    seconds = {node: restricted(problem.nodes[node].seconds, node) for node in nodes}
    return seconds, {node: restricted(problem.nodes[node].num_bytes, node) for node in nodes}


def _restricted(
    edge: Edge,
    edge_bytes: Sequence[Integers | None],
    reduced_cost: Floats,
    ends: Sequence[tuple[Integers, Integers]],
    limit: float,
) -> tuple[Floats, list[Integers | None]]:
    """Return the seconds of an edge, and its bytes in each problem, over what its ends have left; none of what is
    decided.
    """
    near, kept = zip(*ends, strict=True)
    shape = tuple(len(each) for each in kept if len(each) > 1)
    seconds = np.where(cut_table(reduced_cost, near) <= limit, cut_table(edge.seconds, kept), np.inf)
    restricted = [None if each is None else cut_table(each, kept).reshape(shape) for each in edge_bytes]
    return seconds.reshape(shape), restricted
