"""Restricted master problem: choices recombined, part by part, from known ones.

The mixture at the best prices is within all budgets only on average. The mixed choices differ in most layers, and at
every price equal layers choose alike: prices do not tell which layers should follow which choices. This problem decides
it for blocks in place of nodes. Nodes on which the known choices differ split where a single node separates parts
(`order.separators`). Each part, and each such node, is a block. Its columns are the strategies that any known choices
take in it, or in a block of equal nodes. A problem of thousands of nodes becomes one of a few hundred with a few
columns each, which the plain ILP solves with many memory rows.

This is a restricted master heuristic (Joncour et al. 2010), with known choices as columns.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import networkx as nx
import numpy as np

from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.min_marginals import ReducedCosts
from autopar.solver.elimination.order import separators
from autopar.solver.ilp import solve_ilp
from autopar.solver.presolve.reduced_cost_fixing import Remaining, remaining_of_each
from autopar.solver.problem import Edge, Floats, Integers, Node, Problem

MAX_PAIRS = 100_000  # pairs of columns of adjacent blocks: with more, the ILP takes minutes

_Sums = dict[tuple[int, ...], np.ndarray]
"""Blocks → their joint cost, by the column of each."""


class RestrictedMaster:
    """Restricted master problem: choices recombined from blocks of known choices, within memory rows.

    Rows are added one after the other. The problems of rows are equal except for their bytes and budgets, and for the
    edges that these lie on.
    """

    def __init__(self, problem: Problem, visited: Sequence[Sequence[int]]) -> None:
        self._kinds = _kinds_of(problem)
        taken: dict[int, set[int]] = defaultdict(set)
        for choices in visited:
            for kind, choice in zip(self._kinds, choices, strict=True):
                taken[kind].add(choice)
        self._taken = {kind: sorted(each) for kind, each in taken.items()}
        self._left = self._left_of((problem,))[0]
        parts = _members(self._left.problem)
        self._place = {node: (block, axis) for block, nodes in enumerate(parts) for axis, node in enumerate(nodes)}
        self._parts, self._columns = parts, self._columns_of(visited, parts)
        self._seconds = self._summed(self._left.problem, lambda part: part.seconds)
        self._rows: list[tuple[_Sums, int | None]] = []
        self._is_full = False
        """True if the choices that all known ones have in common exceed a budget."""

    def add(self, problems: Sequence[Problem]) -> None:
        """Have what is made be within these budgets, too."""
        for left in self._left_of(problems):
            self._is_full |= math.isinf(left.constant)
            self._rows.append((self._summed(left.problem, lambda part: part.num_bytes), left.problem.budget))

    def best(self, effort: float, tolerance: float, start: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """Return the fastest choices within all budgets that are found with so much effort (`solve_ilp`); None: none.

        Choices that are faster by no more than a tolerance (in seconds) are not looked for. `start` are known choices,
        from which it is looked for better ones.
        """
        first, *others = self._problems()
        if self._is_full or sum(edge.seconds.size for edge in first.edges) > MAX_PAIRS:
            return None
        hint = None if start is None else self._columns_in(start)
        found = solve_ilp(first, effort, hint, tolerance=tolerance, rows=others, repeatable=True).choices
        if found is None:
            return None
        chosen = np.zeros(len(self._left.undecided), dtype=np.intp)
        for nodes, columns, choice in zip(self._parts, self._columns, found, strict=True):
            chosen[nodes] = columns[choice]
        return self._left.extend(chosen.tolist())

    def _left_of(self, problems: Sequence[Problem]) -> list[Remaining]:
        """Return the remaining problems over nodes on which known choices differ; nodes of a kind are treated alike."""
        reduced_cost: dict[int, Floats] = {}
        every: dict[int, Integers] = {}
        nothing: dict[tuple[int, ...], Floats] = {}
        for node, kind in zip(problems[0].nodes, self._kinds, strict=True):
            if kind not in reduced_cost:
                reduced_cost[kind] = np.full(node.num_strategies, np.inf)
                reduced_cost[kind][self._taken[kind]] = 0.0
            every.setdefault(node.num_strategies, np.arange(node.num_strategies))
        of_edge = [nothing.setdefault(edge.seconds.shape, np.zeros(edge.seconds.shape)) for edge in problems[0].edges]
        alive = [every[node.num_strategies] for node in problems[0].nodes]
        found = ReducedCosts(tuple(alive), tuple([reduced_cost[kind] for kind in self._kinds]), tuple(of_edge))
        return remaining_of_each(problems, found, 0.0)

    def _columns_of(self, visited: Sequence[Sequence[int]], parts: Sequence[Sequence[int]]) -> list[Integers]:
        """Return the columns of each block, a row each: known choices of its nodes and of equal blocks."""
        left = np.array([self._left.restrict(choices) for choices in visited], dtype=np.intp)
        kinds = [tuple([self._kinds[self._left.undecided[node]] for node in nodes]) for nodes in parts]
        of_kind: dict[tuple[int, ...], list[Integers]] = defaultdict(list)
        for kind, nodes in zip(kinds, parts, strict=True):
            of_kind[kind].append(left[:, nodes])
        columns = {kind: np.unique(np.concatenate(each), axis=0) for kind, each in of_kind.items()}
        return [columns[kind] for kind in kinds]

    def _columns_in(self, visited: Sequence[int]) -> list[int]:
        """Return the column in `_columns` that known choices take in each block."""
        left = np.array(self._left.restrict(visited), dtype=np.intp)
        each = zip(self._parts, self._columns, strict=True)
        return [int((columns == left[nodes]).all(axis=1).argmax()) for nodes, columns in each]

    def _summed(self, problem: Problem, cost: Callable[[Node | Edge], np.ndarray | None]) -> _Sums:
        """Return the cost of each block, and the joint cost of blocks, by their columns."""
        sums: _Sums = {}
        made: dict[object, np.ndarray] = {}  # of equal parts: equal blocks have the same columns
        nodes = ((node, (number,)) for number, node in enumerate(problem.nodes))
        for part, ends in itertools.chain(nodes, ((edge, edge.ends) for edge in problem.edges)):
            array = cost(part)
            if array is None:
                continue
            blocks = tuple(sorted({self._place[end][0] for end in ends}))
            at = [(blocks.index(block), axis) for block, axis in map(self._place.__getitem__, ends)]
            columns = [self._columns[block] for block in blocks]
            key = (id(array), *at, *map(id, columns))
            if key not in made:
                dims = range(len(blocks))
                index = [columns[dim][:, axis].reshape([-1 if each == dim else 1 for each in dims]) for dim, axis in at]
                made[key] = np.broadcast_to(array[tuple(index)], [len(each) for each in columns])
            sums[blocks] = sums[blocks] + made[key] if blocks in sums else made[key]
        return sums

    def _problems(self) -> list[Problem]:
        """Build one problem per memory row, with a node for each block, and its columns as strategies."""
        together = dict.fromkeys(itertools.chain(self._seconds, *(row_bytes for row_bytes, _ in self._rows)))
        shapes = {blocks: [len(self._columns[block]) for block in blocks] for blocks in together}
        seconds = {blocks: self._seconds.get(blocks, np.zeros(shape)) for blocks, shape in shapes.items()}
        nothing = {blocks: np.zeros(shape, dtype=np.int64) for blocks, shape in shapes.items()}
        found = []
        for row_bytes, budget in self._rows:
            of_row = {**nothing, **row_bytes}
            nodes = [Node(f"piece {n}", seconds[n,], of_row[n,]) for n in range(len(self._parts))]
            edges = [Edge(blocks, seconds[blocks], of_row[blocks]) for blocks in together if len(blocks) > 1]
            found.append(Problem(tuple(nodes), tuple(edges), budget, is_sound=True))
        return found


def _kinds_of(problem: Problem) -> list[int]:
    """Return a number per node, the same for nodes that are alike but for their bytes, and so are their
    surroundings.
    """
    nothing = {node.num_strategies: np.zeros(node.num_strategies, dtype=np.int64) for node in problem.nodes}
    nodes = [Node(node.name, node.seconds, nothing[node.num_strategies]) for node in problem.nodes]
    plain = Problem(tuple(nodes), tuple([Edge(edge.ends, edge.seconds) for edge in problem.edges]))
    return Tables(plain).kinds(plain)


def _members(problem: Problem) -> list[list[int]]:
    """Return the nodes of each block: parts that single nodes separate, and these."""
    apart = separators(problem)
    graph = nx.Graph()
    graph.add_nodes_from(range(len(problem.nodes)))
    for edge in problem.edges:
        graph.add_edges_from(itertools.combinations([end for end in edge.ends if end not in apart], 2))
    return sorted(sorted(each) for each in nx.connected_components(graph))
