"""Why a problem has no solution whatever the memory: a minimal set of nodes whose forbidden strategies conflict.

QuickXplain (Junker, AAAI 2004) over the nodes with a forbidden strategy, asking a feasibility oracle with only some of
the nodes' menus in force. The set is minimal: free any one of its nodes and the others can be satisfied. Where the
edges contradict each other on their own, the same search runs over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.solver.elimination import Tables, evaluate, narrow_elimination, optimum
from autopar.solver.ilp import solve_ilp
from autopar.solver.problem import Node, Problem

ORACLE_SECONDS = 60.0  # for one question to the ILP, which is asked only where elimination cannot answer


def conflicting_nodes(problem: Problem) -> tuple[int, ...]:
    """A minimal set of nodes whose allowed strategies contradict each other; empty if the edges alone do.

    A node with everything forbidden is named whatever else is wrong. The problem must be infeasible without its limit.
    """
    empty = problem.forbidden_node
    if empty is not None:
        return (empty,)
    restricted = [i for i, node in enumerate(problem.nodes) if not np.isfinite(node.seconds).all()]
    found = minimal_conflict(lambda kept: not is_feasible(freed(problem, kept)), (), True, restricted)
    return tuple(sorted(found))


def conflicting_edges(problem: Problem) -> tuple[int, ...]:
    """A minimal set of edges (by position) whose forbidden pairs contradict each other whatever the nodes allow."""
    free = freed(problem, ())
    restricted = [i for i, edge in enumerate(problem.edges) if not np.isfinite(edge.seconds).all()]

    def conflicts(kept: Sequence[int]) -> bool:
        return not is_feasible(Problem(free.nodes, tuple(free.edges[edge] for edge in kept)))

    return tuple(sorted(minimal_conflict(conflicts, (), False, restricted)))


def describe_conflict(problem: Problem) -> str:
    """The conflict as an error message for the user."""
    nodes = conflicting_nodes(problem)
    names = [repr(problem.nodes[node].name) for node in nodes]
    if not nodes:
        edges = [problem.edges[edge] for edge in conflicting_edges(problem)]
        pairs = [" → ".join(repr(problem.nodes[end].name) for end in edge.ends) for edge in edges]
        return f"the forbidden pairs on {', '.join(pairs)} leave no choice of strategies; allow a pair on one of them."
    if not np.isfinite(problem.nodes[nodes[0]].seconds).any():
        count = problem.nodes[nodes[0]].num_strategies
        return f"node {names[0]} has no allowed strategy: all {count} are forbidden. Loosen what is pinned on it."
    if len(nodes) == 1:
        return (
            f"every strategy allowed for node {names[0]} leads into a forbidden pair further on. "
            "Loosen what is pinned on it."
        )
    direct = [edge for edge in problem.edges if set(edge.ends) == set(nodes)]
    where = (
        f"the edge between {names[0]} and {names[1]} forbids every pair of strategies allowed for them"
        if len(nodes) == 2 and direct
        else f"the strategies allowed for {', '.join(names[:-1])} and {names[-1]} exclude each other"
    )
    return f"{where}; without any one of these pins the others can hold. Loosen what is pinned on one of them."


def is_feasible(problem: Problem) -> bool:
    """Whether anything avoids all that is forbidden, whatever bytes it takes."""
    tables = Tables(problem)
    elimination = narrow_elimination(problem, tables)
    if elimination is None:
        return solve_ilp(problem, ORACLE_SECONDS, by_bytes=True).status != "infeasible"
    return optimum(elimination, evaluate(elimination, tables.bytes_only())) < np.inf


def freed(problem: Problem, kept: Sequence[int]) -> Problem:
    """The problem with every strategy allowed on all nodes but `kept`."""
    held = set(kept)
    nodes = tuple(
        node if i in held else Node(node.name, np.zeros(node.num_strategies), node.num_bytes)
        for i, node in enumerate(problem.nodes)
    )
    return Problem(nodes, problem.edges)


def minimal_conflict(
    conflicts: Callable[[Sequence[int]], bool], background: tuple[int, ...], grown: bool, suspects: Sequence[int]
) -> tuple[int, ...]:
    """The suspects of a minimal conflict that contains `background`, which is new since last asked if `grown`."""
    if not suspects or (grown and conflicts(background)):
        return ()
    if len(suspects) == 1:
        return (suspects[0],)
    half = len(suspects) // 2
    first, second = tuple(suspects[:half]), tuple(suspects[half:])
    from_second = minimal_conflict(conflicts, background + first, True, second)
    return from_second + minimal_conflict(conflicts, background + from_second, bool(from_second), first)
