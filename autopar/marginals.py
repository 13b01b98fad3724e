"""Min-marginals: what the optimum would be if a node had to take a given strategy, for all strategies at once.

The second pass of a calibrated elimination tree (Dechter 1999; Dawid 1992). All numbers are *excesses* over the
optimum.
With B_v the bucket of v and m_v its message to the bucket of its parent p:

    excess over v's neighbours    X_v = min_{rest} B_p        (0 at a root)
    calibrated bucket             B_v = Σ tables of v − m_v + X_v
    excess of strategy i of v     min of B_v where x_v = i

A strategy whose excess at a multiplier is above `incumbent − bound` is in no better solution; nor is such a pair of
strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.eliminate import Elimination, bag_sum
from autopar.problem import Edge, Floats, Node, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Excesses:
    """What each strategy of each node, and each pair of each edge, costs above the optimum at least."""

    of_node: tuple[Floats, ...]
    of_edge: tuple[Floats, ...]


def excesses(problem: Problem, elimination: Elimination, tables: Sequence[Floats]) -> Excesses:
    """Calibrate the tree; `tables` is what `evaluate` returned for the same elimination."""
    children = _children(elimination)
    over_neighbours: dict[int, Floats] = {}
    of_node: list[Floats] = [np.empty(0)] * len(problem.nodes)
    of_edge: list[Floats] = [np.empty(0)] * len(problem.edges)
    memory = np.empty(elimination.largest)  # one for all buckets: fresh pages cost more than the sums
    for place in reversed(range(len(elimination.buckets))):
        bucket = elimination.buckets[place]
        message = tables[elimination.num_tables + bucket.step]
        correction = over_neighbours.pop(place, np.zeros(())) - np.where(np.isfinite(message), message, 0.0)
        total = bag_sum(elimination.steps[bucket.step], tables, memory)
        total += correction
        # Rounding leaves the optimum itself a hair off zero; an excess is never negative.
        of_node[bucket.bag[0]] = np.maximum(_minimum(total, bucket.bag, bucket.bag[:1]), 0.0)
        for number in bucket.edges:
            edge = problem.edges[number]
            if edge.source == edge.target:
                of_edge[number] = np.where(np.eye(len(edge.seconds), dtype=bool), of_node[bucket.bag[0]], np.inf)
            else:
                of_edge[number] = np.maximum(_minimum(total, bucket.bag, (edge.source, edge.target)), 0.0)
        for child in children[place]:
            over_neighbours[child] = _minimum(total, bucket.bag, elimination.buckets[child].bag[1:])
    return Excesses(tuple(of_node), tuple(of_edge))


def keep_below(problem: Problem, found: Excesses, limit: float) -> Problem:
    """The same problem with everything forbidden whose excess is above `limit` seconds."""
    nodes = tuple(
        Node(node.name, np.where(excess <= limit, node.seconds, np.inf), node.num_bytes)
        for node, excess in zip(problem.nodes, found.of_node, strict=True)
    )
    edges = tuple(
        Edge(edge.source, edge.target, np.where(excess <= limit, edge.seconds, np.inf))
        for edge, excess in zip(problem.edges, found.of_edge, strict=True)
    )
    return Problem(nodes, edges, problem.budget)


def _children(elimination: Elimination) -> list[list[int]]:
    """Which buckets send their message to each bucket, by place in the order."""
    position = {bucket.bag[0]: place for place, bucket in enumerate(elimination.buckets)}
    children: list[list[int]] = [[] for _ in elimination.buckets]
    for place, bucket in enumerate(elimination.buckets):
        if len(bucket.bag) > 1:
            children[min(position[member] for member in bucket.bag[1:])].append(place)
    return children


def _minimum(total: Floats, bag: tuple[int, ...], kept: tuple[int, ...]) -> Floats:
    """Minimise a table over `bag` down to the nodes `kept`, in that order."""
    found = total.min(axis=tuple(axis for axis, member in enumerate(bag) if member not in kept))
    remaining = [member for member in bag if member in kept]
    return found.transpose([remaining.index(member) for member in kept])
