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

from autopar.eliminate import Elimination, Step, bag_sum
from autopar.problem import Edge, Floats, Integers, Node, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Excesses:
    """What each strategy of each node, and each pair of each edge, costs above the optimum at least."""

    of_node: tuple[Floats, ...]
    of_edge: tuple[Floats, ...]
    of_message: tuple[Floats, ...]
    """For each bucket, over its neighbours: what the rest of the graph costs above its optimum."""


def excesses(problem: Problem, elimination: Elimination, tables: Sequence[Floats], margin: float = np.inf) -> Excesses:
    """Calibrate the tree; `tables` is what `evaluate` returned for the same elimination.

    Excesses above `margin` may be given as inf: buckets are then cut to the neighbours' strategies below it, which
    leaves little work however wide the graph is.
    """
    children = children_of(elimination)
    alive: dict[int, Integers] = {}
    over_neighbours: dict[int, Floats] = {}
    of_node: list[Floats] = [np.empty(0)] * len(problem.nodes)
    of_edge: list[Floats] = [np.empty(0)] * len(problem.edges)
    of_message: list[Floats] = [np.zeros(())] * len(elimination.buckets)
    for place in reversed(range(len(elimination.buckets))):
        bucket = elimination.buckets[place]
        step = elimination.steps[bucket.step]
        node, around = bucket.bag[0], bucket.bag[1:]
        rows = tuple(alive[each] for each in around)
        outside = over_neighbours.pop(place, np.zeros(()))
        of_message[place] = _spread(outside, rows, step.sizes[1:])
        message = _cut(tables[elimination.num_tables + bucket.step], rows)
        total = _cut_bag_sum(step, tables, rows)
        total += outside - np.where(np.isfinite(message), message, 0.0)
        # Rounding leaves the optimum itself a hair off zero; an excess is never negative.
        of_node[node] = np.maximum(_minimum(total, bucket.bag, bucket.bag[:1]), 0.0)
        alive[node] = np.flatnonzero(of_node[node] <= margin)
        total = total[alive[node]]
        for number in bucket.edges:
            edge = problem.edges[number]
            if edge.is_loop:
                of_edge[number] = np.where(np.eye(len(edge.seconds), dtype=bool), of_node[node], np.inf)
                continue
            least = np.maximum(_minimum(total, bucket.bag, edge.ends), 0.0)
            of_edge[number] = _spread(least, tuple(alive[end] for end in edge.ends), edge.seconds.shape)
        for child in children[place]:
            over_neighbours[child] = _minimum(total, bucket.bag, elimination.buckets[child].bag[1:])
    return Excesses(tuple(of_node), tuple(of_edge), tuple(of_message))


def _cut(table: Floats, rows: tuple[Integers, ...]) -> Floats:
    """The part of a table at some strategies of each of its nodes."""
    return table[np.ix_(*rows)] if rows else table


def _spread(part: Floats, rows: tuple[Integers, ...], shape: Sequence[int]) -> Floats:
    """A table that is `part` at some strategies of each of its nodes, and inf elsewhere."""
    if all(len(each) == size for each, size in zip(rows, shape, strict=True)):
        return np.broadcast_to(part, tuple(shape))
    whole = np.full(tuple(shape), np.inf)
    whole[np.ix_(*rows)] = part
    return whole


def _cut_bag_sum(step: Step, tables: Sequence[Floats], rows: tuple[Integers, ...]) -> Floats:
    """All tables of a step added up over its bag, at some strategies of the neighbours."""
    every = (np.arange(step.sizes[0]), *rows)
    cut = [tables[number][np.ix_(*(every[axis] for axis in axes))] for number, axes in step.inputs]
    sizes = tuple(len(each) for each in every)
    if not all(sizes):
        return np.full(sizes, np.inf)
    inputs = tuple((number, axes) for number, (_, axes) in enumerate(step.inputs))
    return bag_sum(Step(sizes, inputs), cut)


def keep_below(problem: Problem, found: Excesses, limit: float) -> Problem:
    """The same problem with everything forbidden whose excess is above `limit` seconds."""
    nodes = tuple(
        Node(node.name, np.where(excess <= limit, node.seconds, np.inf), node.num_bytes)
        for node, excess in zip(problem.nodes, found.of_node, strict=True)
    )
    edges = tuple(
        Edge(edge.ends, np.where(excess <= limit, edge.seconds, np.inf), edge.num_bytes)
        for edge, excess in zip(problem.edges, found.of_edge, strict=True)
    )
    return Problem(nodes, edges, problem.budget)


def children_of(elimination: Elimination) -> list[list[int]]:
    """Which buckets send their message to each bucket, by place in the order."""
    position = {bucket.bag[0]: place for place, bucket in enumerate(elimination.buckets)}
    children: list[list[int]] = [[] for _ in elimination.buckets]
    for place, bucket in enumerate(elimination.buckets):
        if len(bucket.bag) > 1:
            children[min(position[member] for member in bucket.bag[1:])].append(place)
    return children


def _minimum(total: Floats, bag: tuple[int, ...], kept: tuple[int, ...]) -> Floats:
    """Minimise a table over `bag` down to the nodes `kept`, in that order."""
    away = tuple(axis for axis, member in enumerate(bag) if member not in kept)
    found = total.min(axis=away, initial=np.inf)
    remaining = [member for member in bag if member in kept]
    return found.transpose([remaining.index(member) for member in kept])
