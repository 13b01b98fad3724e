"""Greedy elimination order of a graph.

An order depends on the graph and the numbers of candidate strategies, not on their costs. A search that solves the same
graph again, with other memory rows, reuses the previous order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from functools import lru_cache

from autopar.solver.deadline import check_whole
from autopar.solver.problem import Problem

CROWDED = 10  # neighbours of a node whose fill is not counted
KEPT = 32  # cached orders, of the graphs used last


def elimination_order(
    problem: Problem, balanced: bool, by_growth: bool = False, most: float = math.inf
) -> list[int] | None:
    """Return the nodes of degree 0, 1 and 2 first, then by least fill; ties by table size and position.

    Returns None as soon as a bucket has more than `most` entries: larger ones follow, which take the longest.
    """
    sizes = tuple([node.num_strategies for node in problem.nodes])
    order = _order(sizes, tuple([edge.ends for edge in problem.edges]), balanced, by_growth, most)
    return None if order is None else list(order)


@lru_cache(KEPT)
def _order(
    sizes: tuple[int, ...], edges: tuple[tuple[int, ...], ...], balanced: bool, by_growth: bool, most: float
) -> tuple[int, ...] | None:
    around: list[set[int]] = [set() for _ in sizes]
    for ends in edges:
        for one, other in itertools.permutations(ends, 2):
            if one != other:
                around[one].add(other)
    depth = [0] * len(sizes)
    message = [math.prod([sizes[other] for other in each]) for each in around]  # current: reshards have many neighbours
    total = [sum([sizes[other] for other in each]) for each in around]

    def priority(node: int) -> tuple[float, ...]:
        table = sizes[node] * message[node]
        if by_growth:
            growth = message[node] - sizes[node] * total[node] if len(around[node]) > 1 else -math.inf
            return (growth, table, depth[node], node)
        fill = 0
        if len(around[node]) > CROWDED:
            fill = len(around[node]) ** 2  # not worth counting: it is late in any good order
        elif len(around[node]) > 2:
            fill = 1 + sum(b not in around[a] for a, b in itertools.combinations(around[node], 2))
        first, second = (depth[node], table) if balanced else (table, depth[node])
        return (fill, first, second, node)

    current = {node: priority(node) for node in range(len(sizes))}
    heap = list(current.values())
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        check_whole()
        entry = heapq.heappop(heap)
        node = int(entry[-1])
        if current.get(node) != entry:
            continue
        del current[node]
        order.append(node)
        neighbours = around[node]
        if sizes[node] * message[node] > most:
            return None
        changed = set(neighbours)
        for one in neighbours:
            around[one].discard(node)
            message[one] //= sizes[node]
            total[one] -= sizes[node]
            depth[one] = max(depth[one], depth[node] + 1)
        for one, other in itertools.combinations(sorted(neighbours), 2):
            if other not in around[one]:
                for end, new in ((one, other), (other, one)):
                    around[end].add(new)
                    message[end] *= sizes[new]
                    total[end] += sizes[new]
                changed |= around[one] & around[other]
        for other in changed:
            current[other] = priority(other)
            heapq.heappush(heap, current[other])
    return tuple(order)
