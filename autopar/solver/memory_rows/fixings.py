"""Fixings: the part of a problem that can be within a limit on the seconds, whatever further memory rows it gets.

No choice within the limit and the budget has a strategy whose reduced cost at a memory price (`min_marginals`) exceeds
the margin up to that limit. Further rows only forbid choices, so such a strategy stays out. One row thus makes
the problem smaller for all searches that add other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver.deadline import NEVER
from autopar.solver.elimination.evaluation import evaluate, optimum
from autopar.solver.elimination.min_marginals import shared_reduced_costs
from autopar.solver.prepared import Prepared
from autopar.solver.problem import Floats, Node, Problem

ROUNDING = 1e-9  # of the seconds: excesses carry that of long sums; a strategy too many does no harm


@dataclass(frozen=True, slots=True, eq=False)
class Fixings:
    """The strategies of each node that choices of at most `limit` seconds take."""

    kept: tuple[NDArray[np.bool_], ...]
    limit: float

    def holds(self, choices: Sequence[int]) -> bool:
        """Return whether the fixings leave all of these choices."""
        return all(bool(kept[choice]) for kept, choice in zip(self.kept, choices, strict=True))

    def of(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems, one memory row each, without the other strategies; equal candidates stay one array."""
        shared: dict[tuple[int, int], Floats] = {}
        masked_seconds = []
        for node, kept in zip(problems[0].nodes, self.kept, strict=True):
            key = id(node.seconds), id(kept)
            if key not in shared:
                shared[key] = np.where(kept, node.seconds, np.inf)
            masked_seconds.append(shared[key])
        found = []
        for each in problems:
            nodes = [
                Node(node.name, seconds, node.num_bytes)
                for node, seconds in zip(each.nodes, masked_seconds, strict=True)
            ]
            found.append(Problem(tuple(nodes), each.edges, each.budget, is_sound=True))
        return found


class FixingSearch:
    """A problem with a memory row, evaluated at a price of its bytes, and what is left of it within margins of that.

    Its graph has low treewidth. An evaluation that a search has just ended with is taken over from it; TimeLimitError
    where one takes until the deadline.
    """

    def __init__(self, prepared: Prepared, price: float, deadline: float = NEVER) -> None:
        assert prepared.elimination is not None, "a wide graph"
        self._prepared, self._elimination, self._deadline = prepared, prepared.elimination, deadline
        incumbent = prepared.visited.taken(price)
        self._evaluated = incumbent or evaluate(self._elimination, prepared.tables.weighted(price), deadline)
        paid = price * (prepared.smaller.budget or 0)
        self.bound = optimum(self._elimination, self._evaluated) - paid
        """No choices within the budget take less."""

    def within(self, share: float, incumbent: float = math.inf) -> Fixings:
        """Return the strategies of choices that cost at most `share` above the bound, and at most `incumbent`
        seconds.
        """
        prepared, limit = self._prepared, min(self.bound + share * abs(self.bound), incumbent)
        margin = limit - self.bound + ROUNDING * abs(self.bound)
        tables, evaluated = prepared.tables, self._evaluated
        found = shared_reduced_costs(prepared.smaller, self._elimination, tables, evaluated, margin, self._deadline)
        kept = [np.zeros(node.num_strategies, dtype=bool) for node in prepared.problem.nodes]
        for reduced_cost, members in zip(found.of_node, prepared.contracted.members, strict=True):
            near = np.flatnonzero(reduced_cost <= margin)
            for node, strategies in members.items():
                kept[node][prepared.pruned.kept[node][strategies[near]]] = True
        equal: dict[bytes, NDArray[np.bool_]] = {}
        return Fixings(tuple([equal.setdefault(each.tobytes(), each) for each in kept]), limit)
