"""Arc consistency (AC-3) on a core: the strategies that nodes may still take, given those already taken.

If much is forbidden, the best strategy given the earlier nodes may leave a later node without any. So a strategy is
taken only if every node keeps one that is compatible along every joint (Mackworth 1977).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.presolve.pruning import Pruned, prune_each
from autopar.solver.problem import Floats, Node, Problem

_Mask = np.ndarray


class Domains:
    """Strategies of each node that no joint rules out, while nodes take theirs one after the other."""

    def __init__(self, own: Mapping[int, Floats], ends: Sequence[tuple[int, ...]], costs: Sequence[Floats]) -> None:
        self.allowed: dict[int, _Mask] = {node: row < np.inf for node, row in own.items()}
        finite: dict[int, _Mask | None] = {}  # equal joints share their table
        self._joints: list[tuple[tuple[int, ...], _Mask]] = []
        for scope, table in zip(ends, costs, strict=True):
            if id(table) not in finite:
                mask = table < np.inf
                finite[id(table)] = None if mask.all() else mask
            if (found := finite[id(table)]) is not None:
                self._joints.append((scope, found))
        self._at: dict[int, list[int]] = {node: [] for node in own}
        for number, (scope, _) in enumerate(self._joints):
            for end in scope:
                self._at[end].append(number)
        left = self._propagated({}, range(len(self._joints)))
        self.allowed.update(left or {})
        self.is_empty = left is None or not all(mask.any() for mask in self.allowed.values())
        """True if a node has no strategy left before any node took one."""

    def take(self, node: int, row: Floats) -> int | None:
        """Return the least of a row whose strategy leaves every other node one; None if none does."""
        for choice in np.argsort(row, kind="stable").tolist():
            if not self.allowed[node][choice] or row[choice] == np.inf:
                continue
            alone = np.zeros(len(row), dtype=bool)
            alone[choice] = True
            left = self._propagated({node: alone}, self._at[node])
            if left is not None:
                self.allowed.update(left)
                return choice
        return None

    def _propagated(self, changed: dict[int, _Mask], joints: Sequence[int]) -> dict[int, _Mask] | None:
        """Propagate changes of some nodes; return the strategies left to all nodes they reach.

        None if a node is left without a strategy.
        """
        waiting = dict.fromkeys(joints)
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            scope, mask = self._joints[number]
            for axis, end in enumerate(scope):
                allowed = changed.get(end, self.allowed[end])
                mask = mask & allowed.reshape([-1 if axis == dim else 1 for dim in range(mask.ndim)])
            for axis, end in enumerate(scope):
                support = np.asarray(mask.any(axis=tuple(dim for dim in range(mask.ndim) if dim != axis)))
                if support.sum() == changed.get(end, self.allowed[end]).sum():
                    continue
                if not support.any():
                    return None
                changed[end] = support
                waiting.update(dict.fromkeys(other for other in self._at[end] if other != number))
        return changed


def consistent(problems: Sequence[Problem]) -> list[Pruned] | None:
    """Drop strategies that leave a neighbour no choice, repeatedly (AC-3); None if nothing is left.

    They differ in bytes and budgets.
    """
    problem = problems[0]
    own = dict(enumerate(node.seconds for node in problem.nodes))
    for edge in problem.edges:
        if edge.is_loop:
            own[edge.ends[0]] = own[edge.ends[0]] + np.diagonal(edge.seconds)
    pairs = [edge for edge in problem.edges if not edge.is_loop]
    domains = Domains(own, [edge.ends for edge in pairs], [edge.seconds for edge in pairs])
    if domains.is_empty:
        return None
    shared: dict[tuple[int, bytes], Floats] = {}  # equal candidate lists stay one array
    masked_seconds = []
    for number, node in enumerate(problem.nodes):
        mask = domains.allowed[number]
        key = id(node.seconds), mask.tobytes()
        if key not in shared:
            shared[key] = node.seconds if mask.all() else np.where(mask, node.seconds, np.inf)
        masked_seconds.append(shared[key])
    left = []
    for each in problems:
        masked = zip(each.nodes, masked_seconds, strict=True)
        nodes = tuple([Node(node.name, seconds, node.num_bytes) for node, seconds in masked])
        left.append(Problem(nodes, each.edges, each.budget, is_sound=True))
    return prune_each(left)
