"""Why a problem has no solution: a minimal set of nodes whose forbidden strategies conflict, alone or with the limit.

QuickXplain (Junker, AAAI 2004) over the pinned nodes (those with a forbidden strategy), calling an oracle with the pins
of only some nodes in force: is anything feasible, whatever bytes it takes; or, with a memory limit,

    B(P) = min bytes(x)  over choices x that keep to the pins P        P conflicts with the limit if B(P) > limit

The set is minimal: with only its pins in force, freeing any one of them is enough. Where the edges contradict each
other on their own, the same search runs over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from autopar.solver.deadline import NEVER, is_over
from autopar.solver.elimination.bucket_elimination import narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate, optimum
from autopar.solver.ilp import solve_ilp
from autopar.solver.oracles import lower_bound
from autopar.solver.problem import Node, Problem

MAX_QUESTIONS = 64  # each is one elimination; beyond, the set named conflicts but may not be minimal
MAX_NAMED = 6  # pins that are named, with their worth: where time is over all of them may take part
ORACLE_SECONDS = 60.0  # for one ILP solve, used only where elimination cannot answer


def conflict_with_limit(problem: Problem, deadline: float = NEVER) -> tuple[int, ...]:
    """Return a minimal set of nodes whose pins leave no choice within the memory limit; empty if it is too low without.

    Some choices must keep to all pins. After the deadline, and `MAX_QUESTIONS`, the oracle is not called again; the set
    may then not be minimal.
    """
    budget, questions = problem.budget, itertools.count(1)
    assert budget is not None, "no limit to conflict with"

    def conflicts(kept: Sequence[int]) -> bool:
        # Without an answer the suspects stay, which leaves the set a conflict.
        if next(questions) > MAX_QUESTIONS or is_over(deadline):
            return False
        return lower_bound(freed(problem, kept).in_bytes(), 0.0) > budget

    return tuple(sorted(minimal_conflict(conflicts, (), True, _pinned(problem))))


def conflicting_nodes(problem: Problem, deadline: float = NEVER) -> tuple[int, ...]:
    """Return a minimal set of nodes whose allowed strategies contradict each other; empty if the edges alone do.

    After the deadline the oracle is not called again; the set may then not be minimal. A node with all strategies
    forbidden is always named. The problem must be infeasible without its limit.
    """
    empty = problem.forbidden_node
    if empty is not None:
        return (empty,)

    def conflicts(kept: Sequence[int]) -> bool:
        return not is_over(deadline) and not is_feasible(freed(problem, kept))

    return tuple(sorted(minimal_conflict(conflicts, (), True, _pinned(problem))))


def _pinned(problem: Problem) -> list[int]:
    """Return the nodes of which a strategy is forbidden."""
    return [i for i, node in enumerate(problem.nodes) if not np.isfinite(node.seconds).all()]


def conflicting_edges(problem: Problem, deadline: float = NEVER) -> tuple[int, ...]:
    """Return a minimal set of edges (by position) whose forbidden pairs contradict each other whatever the nodes allow.

    After the deadline the oracle is not called again; the set may then not be minimal.
    """
    free = freed(problem, ())
    restricted = [i for i, edge in enumerate(problem.edges) if not np.isfinite(edge.seconds).all()]

    def conflicts(kept: Sequence[int]) -> bool:
        rest = Problem(free.nodes, tuple(free.edges[edge] for edge in kept))
        return not is_over(deadline) and not is_feasible(rest)

    return tuple(sorted(minimal_conflict(conflicts, (), False, restricted)))


def describe_conflict(problem: Problem, deadline: float = NEVER) -> str:
    """Return the conflict as an error message for the user."""
    nodes = conflicting_nodes(problem, deadline)
    names = [repr(problem.nodes[node].name) for node in nodes]
    if not nodes:
        edges = [problem.edges[edge] for edge in conflicting_edges(problem, deadline)]
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
        else f"the strategies allowed for {_listed(names)} exclude each other"
    )
    if is_over(deadline):
        return f"{where}, or some of them do: the time limit passed. Loosen what is pinned on them, or raise the limit."
    return f"{where}; without any one of these pins the others can hold. Loosen what is pinned on one of them."


def _listed(names: Sequence[str]) -> str:
    """Return the names as a list in words; of many the first few, and how many more there are."""
    shown = names if len(names) <= MAX_NAMED else [*names[:MAX_NAMED], f"{len(names) - MAX_NAMED:,} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def is_feasible(problem: Problem) -> bool:
    """Return whether any choice avoids all that is forbidden, whatever bytes it takes."""
    tables = Tables(problem)
    elimination = narrow_elimination(problem, tables)
    if elimination is None:
        return solve_ilp(Problem(problem.nodes, problem.edges), ORACLE_SECONDS).status != "infeasible"
    return optimum(elimination, evaluate(elimination, tables.weighted(0.0))) < np.inf


def freed(problem: Problem, kept: Sequence[int]) -> Problem:
    """Return the problem with every strategy allowed on all nodes but `kept`."""
    fixed = set(kept)
    nodes = tuple(
        node if i in fixed else Node(node.name, np.zeros(node.num_strategies), node.num_bytes)
        for i, node in enumerate(problem.nodes)
    )
    return Problem(nodes, problem.edges)


def minimal_conflict(
    conflicts: Callable[[Sequence[int]], bool], background: tuple[int, ...], grown: bool, suspects: Sequence[int]
) -> tuple[int, ...]:
    """Return the suspects of a minimal conflict that contains `background`; `grown`: it grew since the last call."""
    if not suspects or (grown and conflicts(background)):
        return ()
    if len(suspects) == 1:
        return (suspects[0],)
    half = len(suspects) // 2
    first, second = tuple(suspects[:half]), tuple(suspects[half:])
    from_second = minimal_conflict(conflicts, background + first, True, second)
    return from_second + minimal_conflict(conflicts, background + from_second, bool(from_second), first)
