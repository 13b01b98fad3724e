"""A good solution if the treewidth is too high for elimination: large neighbourhoods, each solved exactly.

Some nodes with many neighbours are fixed at one strategy, so that the rest has low treewidth and is solved to its
optimum. Then one of them after the other is freed, all others fixed, as long as that finds something better (large
neighbourhood search, Shaw 1998). The answer is no proof; the ILP begins with it and brings the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from autopar.solver.deadline import is_over
from autopar.solver.lagrangian import Point
from autopar.solver.presolve.reduction import with_fixed
from autopar.solver.problem import Problem

NARROW = 2_000_000  # entries of a bag while all are fixed
FEW = 3  # strategies of how a segment is computed again
Solve = Callable[[Problem, float], Point | None]
"""(problem of low treewidth, deadline) → its best solution, None if there is none."""


def good_solution(problem: Problem, solve: Solve, deadline: float) -> Point | None:
    """Return the best solution found; None where none was."""
    fixed = separators(problem, NARROW)
    best: Point | None = None
    for start in _starts(problem, fixed):
        best = solve(with_fixed(problem, start), deadline)
        if best is not None:
            break
    if best is None:
        return None
    improved = True
    while improved and not is_over(deadline):
        improved = False
        for node in fixed:
            if is_over(deadline):
                break
            found = solve(
                with_fixed(problem, {other: best.choices[other] for other in fixed if other != node}), deadline
            )
            if found is not None and found.seconds < best.seconds * (1 - 1e-9):
                best, improved = found, True
    return best


def separators(problem: Problem, most: int) -> tuple[int, ...]:
    """Return nodes to fix, so that the rest has low treewidth: bags of at most `most` entries.

    Nodes are eliminated, though no table is computed, the one of the smallest bag first. If that is large, the node
    with the most neighbours is fixed; modes of segments (`FEW` strategies) come last.
    """
    sizes = [node.num_strategies for node in problem.nodes]
    around: dict[int, set[int]] = {node: set() for node in range(len(sizes))}
    for edge in problem.edges:
        for end in edge.ends:
            around[end] |= set(edge.ends) - {end}

    def entries(node: int) -> tuple[int, int]:
        return sizes[node] * math.prod([sizes[other] for other in around[node]]), node

    current = {node: entries(node) for node in around}
    heap = list(current.values())
    heapq.heapify(heap)
    fixed: list[int] = []
    while heap:
        entry = heapq.heappop(heap)
        node = entry[-1]
        if current.get(node) != entry:
            continue
        is_fixed = entry[0] > most
        if is_fixed:
            heapq.heappush(heap, entry)
            node = max(around, key=lambda each: (sizes[each] > FEW, len(around[each]), sizes[each], -each))
            fixed.append(node)
        del current[node]
        neighbours = around.pop(node)
        for other in neighbours:
            around[other].discard(node)
            if not is_fixed:
                around[other] |= neighbours - {other}
            current[other] = entries(other)
            heapq.heappush(heap, current[other])
    return tuple(fixed)


def _starts(problem: Problem, fixed: tuple[int, ...]) -> list[dict[int, int]]:
    """Strategies to begin with: the fastest of each node with the best that its edges can do, and the smallest."""
    bounds = [node.seconds.copy() for node in problem.nodes]
    for edge in problem.edges:
        for place, end in enumerate(edge.ends):
            others = tuple(axis for axis in range(edge.seconds.ndim) if axis != place)
            bounds[end] = bounds[end] + edge.seconds.min(axis=others)
    fastest = {node: int(np.argmin(bounds[node])) for node in fixed}
    sizes = [np.where(np.isfinite(b), n.num_bytes, np.inf) for b, n in zip(bounds, problem.nodes, strict=True)]
    return [fastest, {node: int(np.argmin(sizes[node])) for node in fixed}]
