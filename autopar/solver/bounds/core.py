"""The core of a graph of high treewidth: the rest after eliminating every node whose bag is small.

Parameters, chains and blocks around a residual stream go, and equal layers share the work (`elimination`). Between the
nodes of the core lie edges, and messages over two or three of them; what lies between the same ones is added up.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.elimination.bucket_elimination import Bucket, Elimination, EliminationStep, bag_of
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.min_marginals import cut_bag_sum
from autopar.solver.problem import Floats, Problem

MAX_BAG = 6_000_000  # entries of a bag
MAX_MESSAGE = 200_000  # entries of what a node leaves
MAX_ENDS = 3  # nodes that it is left over


@dataclass(frozen=True, slots=True)
class Joint:
    """Nodes of the core, and the tables between them: number, and for each of its dims the place among the nodes."""

    ends: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """The nodes that are left, what each costs (numbers of tables), what they cost together, and the way back."""

    nodes: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    joints: tuple[Joint, ...]
    constants: tuple[int, ...]
    """Messages of parts of which no node is left."""
    elimination: Elimination
    """Elimination of the other nodes; its messages are numbered after the tables of the problem."""

    def spread(self, reached: list[Floats], tables: Sequence[Floats], most: float, bound: float) -> None:
        """Fill in, for each strategy of the other nodes, a bound on the choices that take it.

        `reached` has those of the core; what is above `most` may be infinite. `bound` is that of all choices.
        """
        for bucket in reversed(self.elimination.buckets):
            around = [np.flatnonzero(reached[other] <= most) for other in bucket.bag[1:]]
            step = self.elimination.steps[bucket.step]
            if not all(map(len, around)):
                reached[bucket.bag[0]] = np.full(step.sizes[0], np.inf)
                continue
            total = cut_bag_sum(step, tables, tuple(around))
            outside: Floats = np.full((1,) * len(around), bound)
            for axis, (other, near) in enumerate(zip(bucket.bag[1:], around, strict=True)):
                shape = [-1 if axis == dim else 1 for dim in range(len(around))]
                outside = np.maximum(outside, reached[other][near].reshape(shape))
            least = total.min(axis=0)
            total += outside - np.where(np.isfinite(least), least, 0.0)
            reached[bucket.bag[0]] = total.min(axis=tuple(range(1, total.ndim)))


def core_of(problem: Problem, tables: Tables) -> Core:
    """Eliminate nodes, those of the smallest bags first, as long as bags and messages are small."""
    return _Shrinking(problem, tables).result()


class _Shrinking:
    def __init__(self, problem: Problem, tables: Tables) -> None:
        self.sizes = [node.num_strategies for node in problem.nodes]
        self.num_tables = len(tables)
        self.factors: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Factor → its table, and the nodes that it depends on."""
        self.at: dict[int, dict[int, None]] = {node: {} for node in range(len(self.sizes))}
        """Node → its factors."""
        self.depth = [0] * len(self.sizes)
        self.steps: dict[EliminationStep, int] = {}
        self.buckets: list[Bucket] = []
        self.constants: list[int] = []
        for node, table in enumerate(tables.of_node):
            self._add(table, (node,))
        for edge, table in zip(problem.edges, tables.of_edge, strict=True):
            self._add(table, edge.ends[:1] if edge.is_loop else edge.ends)

    def result(self) -> Core:
        current = {node: self._priority(node) for node in self.at}
        heap = [each for each in current.values() if each is not None]
        heapq.heapify(heap)
        while heap:
            entry = heapq.heappop(heap)
            node = entry[-1]
            if node in self.at and current[node] == entry:
                for other in self._eliminate(node):
                    current[other] = self._priority(other)
                    if (new := current[other]) is not None:
                        heapq.heappush(heap, new)
        elimination = Elimination(tuple(self.steps), tuple(self.buckets), self.num_tables)
        own = tuple(tuple(t for t, scope in map(self.factors.get, self.at[n]) if len(scope) == 1) for n in self.at)  # type: ignore[misc]
        return Core(tuple(self.at), own, self._joints(), tuple(self.constants), elimination)

    def _priority(self, node: int) -> tuple[int, int, int] | None:
        """Return the entries of its bag; shallow nodes first, so that equal layers shrink alike. None: it stays."""
        around: set[int] = set()
        for factor in self.at[node]:
            around.update(self.factors[factor][1])
            if len(around) > MAX_ENDS + 1:
                return None
        around.discard(node)
        left = math.prod([self.sizes[other] for other in around])
        if len(around) > MAX_ENDS or left > MAX_MESSAGE or left * self.sizes[node] > MAX_BAG:
            return None
        return left * self.sizes[node], self.depth[node], node

    def _add(self, table: int, scope: tuple[int, ...]) -> None:
        factor = len(self.factors)
        self.factors[factor] = table, scope
        for node in scope:
            self.at[node][factor] = None

    def _eliminate(self, node: int) -> list[int]:
        factors = [self.factors[factor] for factor in self.at[node]]
        bag, step = bag_of(node, factors, self.sizes)
        number = self.steps.setdefault(step, len(self.steps))
        self.buckets.append(Bucket(bag, number, ()))
        for factor in self.at.pop(node):
            for other in self.factors[factor][1]:
                if other != node:
                    del self.at[other][factor]
        for other in bag[1:]:
            self.depth[other] = max(self.depth[other], self.depth[node] + 1)
        if len(bag) > 1:
            self._add(self.num_tables + number, bag[1:])
        else:
            self.constants.append(self.num_tables + number)
        return list(bag[1:])

    def _joints(self) -> tuple[Joint, ...]:
        """Join factors over the same nodes, or over a subset of them; sort the ends by their sizes.

        The longest rows are then contiguous in memory: over short ones messages take several times as long.
        """
        left = dict.fromkeys(factor for factors in self.at.values() for factor in factors)
        scopes: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        larger: dict[frozenset[int], tuple[int, ...]] = {}
        shared = [self.factors[factor] for factor in left if len(self.factors[factor][1]) > 1]
        for _, scope in sorted(shared, key=lambda each: -len(each[1])):
            ends = tuple(sorted(scope, key=lambda end: (self.sizes[end], end)))
            for count in range(2, len(ends) + 1) if frozenset(ends) not in larger else ():
                for some in itertools.combinations(ends, count):
                    larger.setdefault(frozenset(some), ends)
        for table, scope in shared:
            ends = larger[frozenset(scope)]
            scopes[ends].append((table, tuple(ends.index(member) for member in scope)))
        return tuple(Joint(ends, tuple(each)) for ends, each in scopes.items())
