"""Why a problem has no solution: a minimal set of nodes whose forbidden strategies conflict, alone or with the limit.

QuickXplain (Junker, AAAI 2004) over the pinned nodes (those with a forbidden strategy), calling an oracle with the pins
of only some nodes in force: is anything feasible, whatever bytes it takes; or, with a memory limit,

    B(P) = min bytes(x)  over choices x that keep to the pins P        P conflicts with the limit if B(P) > limit

The set is minimal: with only its pins in force, freeing any one of them is enough. The value reported for a pin is its
effect with all others in force, B(all pins but this one). Where the edges contradict each other on their own, the same
search runs over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.console.units import format_bytes
from autopar.errors import InfeasibleError
from autopar.solver.deadline import NEVER, is_over
from autopar.solver.elimination.bucket_elimination import narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate, optimum
from autopar.solver.ilp import solve_ilp
from autopar.solver.oracles import lower_bound
from autopar.solver.presolve.pruning import prune
from autopar.solver.problem import Node, Problem

MAX_QUESTIONS = 64  # each is one elimination; beyond, the set named conflicts but may not be minimal
MAX_NAMED = 6  # pins that are named, with their worth: where time is over all of them may take part


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nodes (by position) whose pins cannot all hold, and what freeing each of them gives."""

    nodes: tuple[int, ...]
    """Empty: the memory limit is too low even without any pin, or the edges contradict each other."""
    needs_memory: bool
    """True if the pins conflict only because of the memory limit."""
    least_bytes: int | None
    """Least bytes with all pins in force; None where they contradict each other."""
    least_without: Mapping[int, int | None]
    """Node → least bytes with all pins but its own, for the first few; None where the others still contradict."""
    is_minimal: bool = True

    def frees(self, budget: int | None) -> tuple[int, ...]:
        """Return the nodes of which freeing one alone is enough."""
        fits = ((node, least) for node, least in self.least_without.items() if least is not None)
        return tuple(node for node, least in fits if budget is None or least <= budget)


class MemoryLimitError(InfeasibleError):
    """No choice fits the memory limit. The conflict is computed on first access, as many searches never need it."""

    def __init__(self, problem: Problem, deadline: float = NEVER) -> None:
        super().__init__("")
        self.problem = problem
        self.deadline = deadline

    @cached_property
    def conflict(self) -> Conflict:
        return find_conflict(self.problem, self.deadline)

    def __str__(self) -> str:
        return describe_shortage(self.problem, self.conflict)


def find_conflict(problem: Problem, deadline: float = NEVER) -> Conflict:
    """Return the conflict of an infeasible problem; it includes the memory limit if the pins alone are feasible.

    After the deadline the oracle is not called again; the conflict may then not be minimal.
    """
    pinned = tuple(i for i, node in enumerate(problem.nodes) if not np.isfinite(node.seconds).all())
    least = least_bytes(problem)
    if least == math.inf:
        nodes, is_minimal = conflicting_nodes(problem, deadline), not is_over(deadline)
        return Conflict(nodes, False, None, _least_without(problem, pinned, nodes, deadline), is_minimal)
    budget, num_questions = problem.budget, 0
    assert budget is not None, "without a limit the pins contradict each other"
    least = max(least, budget + 1)  # the bound at high treewidth may not prove this

    def conflicts(kept: Sequence[int]) -> bool:
        nonlocal num_questions
        num_questions += 1
        # Without an answer the suspects stay, which leaves the set a conflict.
        if num_questions > MAX_QUESTIONS or is_over(deadline):
            return False
        return least_bytes(freed(problem, kept)) > budget

    nodes = tuple(sorted(minimal_conflict(conflicts, (), True, pinned)))
    is_minimal = num_questions <= MAX_QUESTIONS and not is_over(deadline)
    return Conflict(nodes, True, round(least), _least_without(problem, pinned, nodes, deadline), is_minimal)


def describe_shortage(problem: Problem, found: Conflict) -> str:
    """Return a conflict with the memory limit as an error message for the user."""
    assert problem.budget is not None and found.least_bytes is not None
    start = (
        f"the memory limit is {format_bytes(problem.budget)} ({problem.budget} bytes) per device, but every choice "
        f"needs at least {format_bytes(found.least_bytes)} ({found.least_bytes} bytes)"
    )
    if not found.nodes:
        return f"{start}, whatever is pinned. Raise the limit, or use more devices."
    worth = [
        f"without the pin on {problem.nodes[node].name!r} the least is {format_bytes(least)}"
        for node, least in found.least_without.items()
        if least is not None
    ]
    more = f" ({len(found.nodes) - len(worth)} more pins take part)" if len(found.nodes) > len(worth) else ""
    return f"{start}: {'; '.join(worth)}{more}. Raise the limit, use more devices, or loosen one of these pins."


def least_bytes(problem: Problem) -> float:
    """Return a lower bound on the bytes of any allowed choice; exact at low treewidth."""
    least = lower_bound(problem.in_bytes(), 0.0)
    if least > -math.inf:
        return least
    result = solve_ilp(prune(problem).problem, ORACLE_SECONDS, by_bytes=True)
    return math.inf if result.status == "infeasible" else result.bound


def _least_without(
    problem: Problem, pinned: Sequence[int], nodes: Sequence[int], deadline: float
) -> Mapping[int, int | None]:
    """Return the least bytes without each of the first nodes' pins; nodes whose question ran out of time are left out.

    None stands for pins that still contradict each other.
    """
    found: dict[int, int | None] = {}
    for node in nodes[:MAX_NAMED]:
        if is_over(deadline):
            break
        least = least_bytes(freed(problem, [each for each in pinned if each != node]))
        if least > -math.inf:
            found[node] = round(least) if least < math.inf else None
    return found


ORACLE_SECONDS = 60.0  # for one ILP solve, used only where elimination cannot answer


def conflicting_nodes(problem: Problem, deadline: float = NEVER) -> tuple[int, ...]:
    """Return a minimal set of nodes whose allowed strategies contradict each other; empty if the edges alone do.

    After the deadline the oracle is not called again; the set may then not be minimal. A node with all strategies
    forbidden is always named. The problem must be infeasible without its limit.
    """
    empty = problem.forbidden_node
    if empty is not None:
        return (empty,)
    restricted = [i for i, node in enumerate(problem.nodes) if not np.isfinite(node.seconds).all()]

    def conflicts(kept: Sequence[int]) -> bool:
        return not is_over(deadline) and not is_feasible(freed(problem, kept))

    return tuple(sorted(minimal_conflict(conflicts, (), True, restricted)))


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
        return solve_ilp(problem, ORACLE_SECONDS, by_bytes=True).status != "infeasible"
    return optimum(elimination, evaluate(elimination, tables.bytes_only())) < np.inf


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
