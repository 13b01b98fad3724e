"""Fixing by excess: what no good choice takes is dropped, and nodes that are left with one strategy are decided.

A strategy whose excess (`min_marginals`) is above what a solution may cost more than the bound is in no such solution.
Most nodes of a problem are decided by that; what remains is a small problem over the others, beside a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.min_marginals import Excesses
from autopar.solver.problem import Edge, Floats, Integers, Node, Problem
from autopar.solver.reductions.reduction import cut_table


@dataclass(frozen=True, slots=True)
class Remaining:
    """The problem over the nodes that are not decided, the seconds of the rest, and the way back."""

    problem: Problem
    constant: float
    """Infinite where what is decided exceeds the memory limit, and where a node is left with nothing."""
    kept: tuple[Integers, ...]
    """For each node of the original problem, the strategies it is left with."""
    undecided: tuple[int, ...]
    """For each node of the problem, its place in the original one."""

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the original problem from those of the smaller one."""
        found = [int(kept[0]) for kept in self.kept]
        for node, choice in zip(self.undecided, choices, strict=True):
            found[node] = int(self.kept[node][choice])
        return tuple(found)

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the smaller problem from those of the original one, which are to be among what is left."""
        return tuple([int(np.searchsorted(self.kept[node], choices[node])) for node in self.undecided])


def remaining(problem: Problem, found: Excesses, limit: float) -> Remaining:
    """What is left of a problem without the strategies and the pairs whose excess is above `limit` seconds."""
    rows = _rows(found, limit)
    kept = tuple([each for _, each in rows])
    if not all(map(len, kept)):
        return Remaining(Problem((), (), problem.budget), math.inf, kept, ())
    decided = np.array([len(each) == 1 for each in kept], dtype=bool)
    undecided = np.flatnonzero(~decided).tolist()
    place = {node: number for number, node in enumerate(undecided)}
    seconds, num_bytes = _menus(problem, kept, undecided)
    edges: list[Edge] = []
    pairs: dict[object, tuple[Floats, Integers | None]] = {}  # equal edges stay one array
    for number in problem.edges_at(~decided):
        edge, excess = problem.edges[number], found.of_edge[number]
        ends = [rows[end] for end in edge.ends]
        key = (id(edge.seconds), id(edge.num_bytes), id(excess), *[id(each) for _, each in ends])
        if key not in pairs:
            pairs[key] = _cut(edge, excess, ends, limit)
        cost, held = pairs[key]
        left = [end for end in edge.ends if end in place]
        if len(left) > 1:
            edges.append(Edge(tuple([place[end] for end in left]), cost, held))
            continue
        seconds[left[0]] = seconds[left[0]] + cost
        if held is not None:
            num_bytes[left[0]] = num_bytes[left[0]] + held
    nodes = tuple(Node(problem.nodes[node].name, seconds[node], num_bytes[node]) for node in undecided)
    constant, taken = problem.cost_of([each[0] for each in kept], among=decided)
    if problem.budget is None:
        return Remaining(Problem(nodes, tuple(edges)), constant, kept, tuple(undecided))
    budget = problem.budget - taken
    constant = constant if budget >= 0 else math.inf
    return Remaining(Problem(nodes, tuple(edges), max(budget, 0)), constant, kept, tuple(undecided))


def _rows(found: Excesses, limit: float) -> list[tuple[Integers, Integers]]:
    """For each node its strategies below the limit: their places among those alive, and in the menu."""
    shared: dict[tuple[int, int], tuple[Integers, Integers]] = {}
    for excess, alive in zip(found.of_node, found.alive, strict=True):
        if (id(excess), id(alive)) not in shared:
            near = np.flatnonzero(excess[alive] <= limit)
            shared[id(excess), id(alive)] = near, alive[near]
    return [shared[id(excess), id(alive)] for excess, alive in zip(found.of_node, found.alive, strict=True)]


def _menus(
    problem: Problem, kept: Sequence[Integers], nodes: Sequence[int]
) -> tuple[dict[int, Floats], dict[int, Integers]]:
    """Seconds and bytes of some nodes over what they have left; equal menus stay one array."""
    shared: dict[tuple[int, int], Floats | Integers] = {}

    def cut(array: Floats | Integers, node: int) -> Any:
        key = id(array), id(kept[node])
        if key not in shared:
            shared[key] = array[kept[node]]
        return shared[key]

    seconds = {node: cut(problem.nodes[node].seconds, node) for node in nodes}
    return seconds, {node: cut(problem.nodes[node].num_bytes, node) for node in nodes}


def _cut(
    edge: Edge, excess: Floats, ends: Sequence[tuple[Integers, Integers]], limit: float
) -> tuple[Floats, Integers | None]:
    """Seconds and bytes of an edge over what its ends have left, without dims of what is decided."""
    near, kept = zip(*ends, strict=True)
    shape = tuple(len(each) for each in kept if len(each) > 1)
    seconds = np.where(cut_table(excess, near) <= limit, cut_table(edge.seconds, kept), np.inf)
    held = None if edge.num_bytes is None else cut_table(edge.num_bytes, kept).reshape(shape)
    return seconds.reshape(shape), held
