"""Graphs that are wide all over: nodes are split wherever an elimination would build a large bag (mini-buckets).

Nodes are eliminated in turn, the one with the smallest bag first, though no table is computed. Where the bag of v has
too many entries, what has fallen into its bucket, edges and messages, is dealt out to several smaller ones, each with
a copy of v of its own:

    min_v (f + g)(v, …)   ≥   min_v₁ f(v₁, …) + min_v₂ g(v₂, …)            (mini-buckets, Dechter & Rish 2003)

Copies that are levelled make up for it: with bags of two nodes the bound that comes of it is that of the ILP's linear
relaxation, which is nearly always the optimum itself (no memory row being there).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict

from autopar.solver.problem import Problem
from autopar.solver.relaxation.loosened import Loosened, with_copies

MAX_BAG = 300_000  # entries: a pair of large menus


def split(problem: Problem) -> Loosened | None:
    """Split nodes until no bag has more than `MAX_BAG` entries, or than its largest edge; None where none has."""
    return _Splitting(problem).result()


class _Splitting:
    """What is left of a problem while its nodes are eliminated: factors, which are edges or messages."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = [node.num_strategies for node in problem.nodes]
        self.origins = list(range(len(problem.nodes)))
        self.ends = [list(edge.ends) for edge in problem.edges]
        self.depth = [0] * len(problem.nodes)
        self.order: list[int] = []
        self.scopes: dict[int, frozenset[int]] = {}
        """Factor → the nodes that it depends on."""
        self.within: dict[int, list[int]] = {}
        """Factor → the edges that have gone into it and end at one of these nodes."""
        self.at: defaultdict[int, set[int]] = defaultdict(set)
        """Node → the factors that depend on it."""
        for number, edge in enumerate(problem.edges):
            self._add(frozenset(edge.ends), [number])

    def result(self) -> Loosened | None:
        current = {node: self._priority(node) for node in range(len(self.sizes))}
        heap = list(current.values())
        heapq.heapify(heap)
        while heap:
            entry = heapq.heappop(heap)
            node = entry[-1]
            if current.get(node) == entry:
                del current[node]
                for other in self._eliminate(node):
                    current[other] = self._priority(other)
                    heapq.heappush(heap, current[other])
        if len(self.origins) == len(self.problem.nodes):
            return None
        return with_copies(self.problem, self.origins, self.ends, self.order)

    def _priority(self, node: int) -> tuple[int, int, int]:
        """The entries of its bag; shallow nodes first, so that equal layers are split alike."""
        bag = {node}.union(*(self.scopes[factor] for factor in self.at[node]))
        return self._entries(bag), self.depth[node], node

    def _entries(self, scope: set[int] | frozenset[int]) -> int:
        return math.prod([self.sizes[node] for node in scope])

    def _add(self, scope: frozenset[int], edges: list[int]) -> None:
        factor = len(self.scopes)
        self.scopes[factor], self.within[factor] = scope, edges
        for node in scope:
            self.at[node].add(factor)

    def _eliminate(self, node: int) -> set[int]:
        """Leave a message for each small bag that holds some of a node's factors; returns the neighbours."""
        bags = self._bags(node)
        self.order.append(node)
        touched: set[int] = set()
        for number, (scope, factors) in enumerate(bags):
            edges = [edge for factor in factors for edge in self.within[factor]]
            if number:
                self._copy(node, edges)
            around = frozenset(scope - {node})
            for factor in factors:
                for other in self.scopes[factor] - {node}:
                    self.at[other].discard(factor)
            if around:
                self._add(around, [edge for edge in edges if not around.isdisjoint(self.ends[edge])])
            for other in around:
                self.depth[other] = max(self.depth[other], self.depth[node] + 1)
            touched |= around
        return touched

    def _bags(self, node: int) -> list[tuple[set[int], list[int]]]:
        """The factors of a node, the largest first, each in the first bag in which it finds room."""
        bags: list[tuple[set[int], list[int]]] = []
        for factor in sorted(self.at[node], key=lambda each: (-self._entries(self.scopes[each]), each)):
            for scope, factors in bags:
                if self._entries(scope | self.scopes[factor]) <= MAX_BAG:
                    scope |= self.scopes[factor]
                    factors.append(factor)
                    break
            else:
                bags.append((set(self.scopes[factor]), [factor]))
        return bags

    def _copy(self, node: int, edges: list[int]) -> None:
        """Let some edges end at a new copy of a node."""
        copy = len(self.origins)
        self.origins.append(node)
        self.order.append(copy)
        for edge in edges:
            self.ends[edge] = [copy if end == node else end for end in self.ends[edge]]
