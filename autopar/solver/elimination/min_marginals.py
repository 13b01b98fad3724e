"""Min-marginals: what the optimum would be if a node had to take a given strategy, for all strategies at once.

The second pass of a calibrated elimination tree (Dechter 1999; Dawid 1992). All numbers are *reduced costs*: seconds
above the optimum. With B_v the bucket of v and m_v its message to the bucket of its parent p ("red." is "reduced"):

    red. cost of neighbours        X_v = min_{rest} B_p        (0 at a root)
    calibrated bucket              B_v = Σ tables of v − m_v + X_v
    red. cost of strategy i of v   min of B_v where x_v = i

A strategy whose reduced cost at a multiplier exceeds `incumbent − bound` is in no better solution; nor is such a pair
of strategies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.deadline import NEVER, check
from autopar.solver.elimination.bucket_elimination import Elimination, EliminationStep
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import bag_sum
from autopar.solver.problem import BLOCK, Floats, Integers, Problem, cut_table


@dataclass(frozen=True, slots=True, eq=False)
class ReducedCosts:
    """Reduced costs of strategies of nodes and pairs of edges: lower bounds on their cost above the optimum.

    They are known for those below the margin.
    """

    alive: tuple[Integers, ...]
    """Strategies of each node whose reduced cost is below the margin."""
    of_node: tuple[Floats, ...]
    """Reduced cost of every strategy of each node."""
    of_edge: tuple[Floats, ...]
    """Reduced cost of every pair of alive strategies at the ends of each edge."""


def cut_bag_sum(
    step: EliminationStep, tables: Sequence[Floats], rows: tuple[Integers, ...], first: Integers | None = None
) -> Floats:
    """Add up all tables of a step over its bag, at some strategies of the neighbours and of the node (None: all)."""
    every = (np.arange(step.sizes[0]) if first is None else first, *rows)
    cut = [cut_table(tables[number], tuple(every[axis] for axis in axes)) for number, axes in step.inputs]
    sizes = tuple(len(each) for each in every)
    if not all(sizes):
        return np.full(sizes, np.inf)
    inputs = tuple((number, axes) for number, (_, axes) in enumerate(step.inputs))
    return bag_sum(EliminationStep(sizes, inputs), cut)


def reduced_costs(
    problem: Problem,
    elimination: Elimination,
    tables: Tables,
    evaluated: Sequence[Floats],
    margin: float = np.inf,
    deadline: float = NEVER,
) -> ReducedCosts:
    """Calibrate the tree; `evaluated` is what `evaluate` returned for the same elimination.

    A reduced cost is the least over all nodes of a kind (`Tables.kinds`): equal layers stay equal, and the work is that
    of an evaluation, or less if little is below the margin. Pairs are over all strategies; those above the margin may
    be infinite. TimeLimitError where that takes until the deadline.
    """
    found = _calibrated_steps(elimination, evaluated, margin, deadline)
    kinds = tables.kinds(problem)
    every = {node.num_strategies: np.arange(node.num_strategies) for node in problem.nodes}
    of_nodes: dict[int, dict[int, Floats]] = defaultdict(dict)
    of_edges: dict[tuple[int, ...], dict[int, Floats]] = defaultdict(dict)
    edge_kinds = [
        (table, *[kinds[end] for end in edge.ends]) for table, edge in zip(tables.of_edge, problem.edges, strict=True)
    ]
    for bucket in elimination.buckets:
        step = found[bucket.step]
        of_nodes[kinds[bucket.bag[0]]][id(step)] = step.of_node
        axis = {member: number for number, member in enumerate(bucket.bag)}
        for number in bucket.edges:
            edge = problem.edges[number]
            least = step.loop if edge.is_loop else step.least[tuple(axis[end] for end in edge.ends)]
            of_edges[edge_kinds[number]][id(least)] = least
    node_least = {kind: _least_of(each.values()) for kind, each in of_nodes.items()}
    edge_least = {kind: _least_of(each.values()) for kind, each in of_edges.items()}
    return ReducedCosts(
        tuple([every[node.num_strategies] for node in problem.nodes]),
        tuple([node_least[kind] for kind in kinds]),
        tuple([edge_least[kind] for kind in edge_kinds]),
    )


def _least_of(arrays: Iterable[Floats]) -> Floats:
    first, *others = arrays
    least = first.copy() if others else first
    for each in others:
        np.minimum(least, each, out=least)
    return least


def outside_steps(
    elimination: Elimination, tables: Sequence[Floats], margin: float = np.inf, deadline: float = NEVER
) -> list[Floats]:
    """Return the least cost of the rest above its optimum, for each step and its neighbours' choices, in any bucket."""
    return [step.outside for step in _calibrated_steps(elimination, tables, margin, deadline)]


@dataclass(slots=True, eq=False)
class _Step:
    """Reduced costs from all calibrated buckets of a step: for their node, their edges and their neighbours."""

    outside: Floats
    of_node: Floats = field(default_factory=lambda: np.empty(0))
    least: dict[tuple[int, ...], Floats] = field(default_factory=dict)
    """Axes of the bag, of the tables of the problem that lie in it → excesses."""
    _loop: Floats | None = None

    @property
    def loop(self) -> Floats:
        """Reduced costs for an edge from the node to itself: those of the node on the diagonal, infinite elsewhere."""
        if self._loop is None:
            self._loop = np.where(np.eye(len(self.of_node), dtype=bool), self.of_node[:, None], np.inf)
        return self._loop


def _calibrated_steps(
    elimination: Elimination, tables: Sequence[Floats], margin: float, deadline: float
) -> list[_Step]:
    """Calibrate the steps from the last to the first, since a step receives messages from earlier steps only."""
    found = [_Step(np.full(each.sizes[1:], np.inf if len(each.sizes) > 1 else 0.0)) for each in elimination.steps]
    for number in reversed(range(len(found))):
        check(deadline)
        step, here = elimination.steps[number], found[number]
        rows = _rows_within(here.outside, margin)
        message = cut_table(tables[elimination.num_tables + number], rows)
        offset = cut_table(here.outside, rows) - np.where(np.isfinite(message), message, 0.0)
        here.of_node = np.full(step.sizes[0], np.inf)
        wanted = [(table, axes) for table, axes in step.inputs if axes != (0,) or table >= elimination.num_tables]
        for table, axes in wanted:
            if table < elimination.num_tables:
                here.least[axes] = np.full([step.sizes[axis] for axis in axes], np.inf)
        height = max(1, BLOCK // max(offset.size, 1))
        for start in range(0, step.sizes[0], height):
            first = np.arange(start, min(start + height, step.sizes[0]))
            total = cut_bag_sum(step, tables, rows, first)
            total += offset
            np.maximum(total, 0.0, out=total)  # rounding leaves the optimum itself a hair off zero
            least = total.min(axis=tuple(range(1, total.ndim)), initial=np.inf)
            here.of_node[first] = least
            near = np.flatnonzero(least <= margin)
            total, cut = total[near], (first[near], *rows)
            for table, axes in wanted:
                is_own = table < elimination.num_tables
                into = here.least[axes] if is_own else found[table - elimination.num_tables].outside
                place = np.ix_(*(cut[axis] for axis in axes))
                into[place] = np.minimum(into[place], _minimum(total, axes))
    return found


def _rows_within(outside: Floats, margin: float) -> tuple[Integers, ...]:
    """Return the indices along each dim of a table at which some entry is within the margin."""
    near = outside <= margin
    dims = range(near.ndim)
    return tuple(np.flatnonzero(near.any(axis=tuple(other for other in dims if other != dim))) for dim in dims)


def _minimum(total: Floats, kept: tuple[int, ...]) -> Floats:
    """Minimise a table down to some of its axes, in that order."""
    found = total.min(axis=tuple(axis for axis in range(total.ndim) if axis not in kept), initial=np.inf)
    remaining = sorted(kept)
    return found.transpose([remaining.index(axis) for axis in kept])
