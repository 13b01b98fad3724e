"""Choices made of those that prices of memory have led to: of each node no strategy but what one of them takes.

Near the best prices, solutions on both sides of the budgets are visited. They may differ in every layer, as two layouts
of all layers do. Choices that fill the budgets take one layout in some layers and the other in the rest, and pay for
reshards in between: too much for a small margin, while a large one leaves too many strategies. With few strategies a
node there is little to look through within any margin.

Taking what is best of several solutions is a crossover (Holland 1975), here the best of all of them: a partition
crossover (Whitley et al. 2009) over parts that need not be apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.solver.bounds.prices import best_prices
from autopar.solver.lagrangian import is_closed
from autopar.solver.memory_rows.fixings import Fixings
from autopar.solver.memory_rows.priced_rows import Rows
from autopar.solver.presolve.contraction import contract_each
from autopar.solver.presolve.reduction import prune_each

MARGINS = (5e-4, 2e-3, 8e-3)  # of the bound: within which choices are made, until they are near enough
MAX_WORK = 10_000_000  # entries of an elimination of what the solutions take


def crossed(
    rows: Rows,
    visited: Sequence[tuple[int, ...]],
    prices: tuple[float, ...],
    bound: float,
    incumbent: float,
    gap: float,
) -> tuple[int, ...] | None:
    """Return the fastest choices within all budgets, below `incumbent` seconds, combined from visited ones; None: none.

    Choices within a gap of the bound are enough. TimeLimitError where that takes until the deadline of the rows.
    """
    if len(visited) < 2:
        return None
    fixings = taken_by(visited, [node.num_strategies for node in rows.problems[0].nodes])
    pruned = prune_each(fixings.of(rows.problems))
    contracted = contract_each([each.problem for each in pruned])
    small = Rows.of([each.problem for each in contracted], rows.deadline, MAX_WORK)
    if small is None:
        return None
    priced = best_prices(small, prices, abs(bound), 0.0, gap, rows.deadline)
    best, seconds = (priced.choices, priced.seconds) if priced.seconds < incumbent else (None, incumbent)
    for margin in MARGINS:
        if is_closed(seconds, bound, gap):
            break
        limit = min(priced.bound + margin * abs(bound), seconds)
        found = small.labelled(priced.prices, limit, limit - priced.bound)[0].choices
        if found is not None and (fast := small.problems[0].seconds_of(found)) < seconds:
            best, seconds = found, fast
    return None if best is None else pruned[0].extend(contracted[0].extend(best))


def taken_by(visited: Sequence[Sequence[int]], sizes: Sequence[int]) -> Fixings:
    """Return the strategies that any of some choices take, of nodes with so many each; equal ones are one array."""
    shared: dict[tuple[int, bytes], NDArray[np.bool_]] = {}
    kept = []
    for size, strategies in zip(sizes, np.array(visited, dtype=np.intp).T, strict=True):
        mask = np.zeros(size, dtype=bool)
        mask[strategies] = True
        kept.append(shared.setdefault((size, mask.tobytes()), mask))
    return Fixings(tuple(kept), np.inf)
