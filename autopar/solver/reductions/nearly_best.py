"""What nearly best choices take: the strategies of each node that are left within a share of the bound of a price.

    reached = L(λ) = min_x [seconds(x) + λ bytes(x)] − λ budget

A strategy whose excess (`min_marginals`) at the price is above a margin is in no choices within the budget of less than
`reached + margin` seconds; nor does a further memory row bring it back. Other questions about the same problem, with
other rows, are asked of what is left, which is far smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.elimination import CHEAP_WORK, Tables, evaluate, narrow_elimination, optimum
from autopar.solver.min_marginals import shared_excesses
from autopar.solver.problem import Problem
from autopar.solver.reductions.contraction import contract
from autopar.solver.reductions.reduction import prune

ROUNDING = 1e-12  # of the seconds: what sums in another order may differ by


@dataclass(frozen=True, slots=True, eq=False)
class NearlyBest:
    """For each node which strategies are left, and the seconds that whatever takes another one is not below."""

    left: tuple[np.ndarray, ...]
    floor: float


def nearly_best(problem: Problem, price: float, share: float, known: float, deadline: float) -> NearlyBest | None:
    """The strategies of choices within a share of the bound of a price of memory, and of fewer than `known` seconds.

    None where that makes nothing easier, as elimination is cheap, where it is not possible, as the graph is too wide
    for it, and where there is no time for it.
    """
    pruned = prune(problem)
    contracted = contract(pruned.problem)
    tables = Tables(contracted.problem)
    elimination = narrow_elimination(contracted.problem, tables)
    if elimination is None or elimination.work <= CHEAP_WORK:
        return None
    try:
        weighted = evaluate(elimination, tables.weighted(price), deadline)
        least, paid = optimum(elimination, weighted), price * (problem.budget or 0)
        reached = least - paid - ROUNDING * (abs(least) + paid)
        margin = share * abs(reached)
        if known < math.inf:
            margin = min(margin, known - reached + ROUNDING * abs(known))
        found = shared_excesses(contracted.problem, elimination, tables, weighted, margin, deadline)
    except TimeLimitError:
        return None
    left: list[np.ndarray] = [np.empty(0)] * len(problem.nodes)
    masks: dict[tuple[bytes, int], np.ndarray] = {}  # equal masks are one array
    for excess, members in zip(found.of_node, contracted.members, strict=True):
        near = np.flatnonzero(excess <= margin)
        for node, strategies in members.items():
            kept = np.unique(pruned.kept[node][strategies[near]])
            key = kept.tobytes(), problem.nodes[node].num_strategies
            if key not in masks:
                masks[key] = np.isin(np.arange(key[1]), kept)
            left[node] = masks[key]
    return NearlyBest(tuple(left), reached + margin)
