"""A good solution of a problem whose graph is too wide for elimination: large neighbourhoods, each solved exactly.

Some nodes with many neighbours are held at one strategy, so that the rest is narrow and solved to its optimum; then one
of them after the other is let go, all others held where they are, as long as that finds something better (large
neighbourhood search, Shaw 1998). The answer is no proof; the ILP begins with it and brings the bound.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.solver.deadline import is_over
from autopar.solver.elimination import Tables, compile_elimination
from autopar.solver.lagrangian import Point
from autopar.solver.problem import Problem
from autopar.solver.reductions.reduction import prune, with_fixed

NARROW = 50_000_000  # entries of a bag while one node is let go
STEP, GROWTH = 4, 1.25  # nodes more, or times as many, until the width is looked for again
Solve = Callable[[Problem, float], Point | None]
"""(narrow problem, deadline) → its best solution, None if there is none."""


def good_solution(problem: Problem, solve: Solve, deadline: float) -> Point | None:
    """The best solution found; None where none was."""
    held = _separators(problem, deadline)
    best: Point | None = None
    for start in _starts(problem, held):
        best = solve(with_fixed(problem, start), deadline)
        if best is not None:
            break
    if best is None:
        return None
    improved = True
    while improved and not is_over(deadline):
        improved = False
        for node in held:
            if is_over(deadline):
                break
            found = solve(
                with_fixed(problem, {other: best.choices[other] for other in held if other != node}), deadline
            )
            if found is not None and found.seconds < best.seconds * (1 - 1e-9):
                best, improved = found, True
    return best


def _separators(problem: Problem, deadline: float) -> tuple[int, ...]:
    """Nodes to hold, those with the most neighbours first, until the rest stays narrow with any one of them let go.

    Widths are dear to find, and a few nodes too many do no harm: it is looked for them ever more rarely, and after the
    deadline once no node has more than two neighbours.
    """
    around: dict[int, set[int]] = {node: set() for node in range(len(problem.nodes))}
    for edge in problem.edges:
        for end in edge.ends:
            around[end] |= set(edge.ends) - {end}
    left = sorted(around, key=lambda node: (-len(around[node]), -problem.nodes[node].num_strategies, node))
    held: list[int] = []
    due = STEP
    while left:
        held.append(left.pop(0))
        is_due = len(held) >= due and not is_over(deadline)
        if len(around[held[-1]]) > 2 and not is_due:
            continue
        if _width(problem, held[1:]) <= NARROW:
            break
        due = max(len(held) + STEP, int(len(held) * GROWTH))
    return tuple(held)


def _width(problem: Problem, held: list[int]) -> int:
    pruned = prune(with_fixed(problem, dict.fromkeys(held, -1))).problem
    return compile_elimination(pruned, Tables(pruned), balanced=False).largest


def _starts(problem: Problem, held: tuple[int, ...]) -> list[dict[int, int]]:
    """Strategies to begin with: the fastest of each node with the best that its edges can do, and the smallest."""
    bounds = [node.seconds.copy() for node in problem.nodes]
    for edge in problem.edges:
        for place, end in enumerate(edge.ends):
            others = tuple(axis for axis in range(edge.seconds.ndim) if axis != place)
            bounds[end] = bounds[end] + edge.seconds.min(axis=others)
    fastest = {node: int(np.argmin(bounds[node])) for node in held}
    sizes = [np.where(np.isfinite(b), n.num_bytes, np.inf) for b, n in zip(bounds, problem.nodes, strict=True)]
    return [fastest, {node: int(np.argmin(sizes[node])) for node in held}]
