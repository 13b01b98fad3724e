"""Graphs that are wide because of hubs, nodes with many neighbours: a bound that lets each neighbour have its own.

The output of an encoder, a position bias or an embedding of the time enters every layer, and its node is in every bag
of an elimination. Loosened, such a node h becomes a copy per neighbour, with its seconds shared among the copies:

    min Σ …  with h_1, h_2, …, h_K free to differ   ≤   min Σ …  with h_1 = h_2 = … = h_K

whatever the shares θ_k are, as long as Σ_k θ_k(h) = seconds(h) for every strategy h (dual decomposition; Lagrangian
splitting, Guignard & Kim 1987). The graph is narrow then. The shares are levelled by min-marginals m_k, so that what
one copy gains by differing another pays:

    θ_k(h) += step · (mean_j m_j(h) - m_k(h))

Models repeat their layers, their copies want the same, and one or two rounds close the gap or leave few strategies of
the hubs, with which the graph is narrow as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.eliminate import CHEAP_WORK, Tables, evaluate, narrow_elimination, optimum
from autopar.marginals import Excesses, excesses
from autopar.problem import Edge, Floats, Node, Problem
from autopar.pruning import prune

MANY = 8  # neighbours: a node with more is a hub
ROUNDS = 6
GRID = 1e-7  # of the bound: excesses that differ by less are the same


@dataclass(frozen=True, slots=True)
class Loosened:
    """A problem whose hubs are copies that may differ; the other nodes, and the first copies, keep their numbers."""

    problem: Problem
    copies: Mapping[int, tuple[int, ...]]
    """Hub → its copies."""

    def excess(self, found: Excesses, node: int) -> Floats:
        """What each strategy of a node of the original problem costs above the bound at least."""
        return np.max([found.of_node[copy] for copy in self.copies.get(node, (node,))], axis=0)

    def agreement(self, found: Excesses) -> dict[int, int]:
        """For every hub, the strategy that its copies want together."""
        sums = {hub: np.sum([found.of_node[copy] for copy in copies], axis=0) for hub, copies in self.copies.items()}
        return {hub: int(np.argmin(each)) for hub, each in sums.items()}

    def levelled(self, found: Excesses, grid: float, step: float = 1.0) -> Loosened:
        """The same with other shares. What is below the grid counts as equal, so that equal layers stay equal."""
        nodes = list(self.problem.nodes)
        for copies in self.copies.values():
            wanted = np.floor(np.stack([found.of_node[copy] for copy in copies]) / grid + 0.5) * grid
            possible = np.isfinite(wanted).all(axis=0)
            wanted[:, ~possible] = 0.0
            shifts = step * (wanted.mean(axis=0) - wanted)
            for copy, shift in zip(copies, shifts, strict=True):
                before = nodes[copy]
                share = np.where(possible, before.seconds + shift, np.inf)
                nodes[copy] = Node(before.name, share, before.num_bytes)
        return Loosened(Problem(tuple(nodes), self.problem.edges, self.problem.budget), self.copies)


@dataclass(slots=True)
class Levelling:
    """Rounds of levelling, each from the best shares so far, by half the step after one that was too long."""

    best: float = -np.inf
    """The best bound so far, in seconds."""
    step: float = 1.0
    start: tuple[Loosened, Excesses] | None = None

    def next(self, loose: Loosened, found: Excesses, bound: float, grid: float) -> Loosened:
        """What to try after `loose`, whose bound and excesses are known."""
        if self.start is None or bound > self.best:
            self.best, self.start = bound, (loose, found)
        else:
            self.step /= 2
        return self.start[0].levelled(self.start[1], grid, self.step)


def loosen(problem: Problem) -> Loosened | None:
    """Give every neighbour of a hub a copy of it; None where there is no hub."""
    around: list[set[int]] = [set() for _ in problem.nodes]
    for edge in problem.edges:
        for end in edge.ends:
            around[end].update(edge.ends)
    hubs = [node for node, neighbours in enumerate(around) if len(neighbours - {node}) > MANY]
    if not hubs:
        return None
    nodes = list(problem.nodes)
    copy_for: dict[int, dict[int, int]] = {hub: {} for hub in hubs}
    edges: list[Edge] = []
    for edge in problem.edges:
        ends = list(edge.ends)
        for place, end in enumerate(edge.ends):
            if end in copy_for and not edge.is_loop:
                neighbour = next(other for other in edge.ends if other != end)
                ends[place] = copy_for[end].setdefault(neighbour, len(nodes) if copy_for[end] else end)
                if ends[place] == len(nodes):
                    nodes.append(Node(nodes[end].name, nodes[end].seconds, np.zeros_like(nodes[end].num_bytes)))
        edges.append(edge if tuple(ends) == edge.ends else Edge(tuple(ends), edge.seconds, edge.num_bytes))
    copies = {hub: tuple(copy_for[hub].values()) for hub in hubs}
    for of_hub in copies.values():
        for copy in of_hub:
            nodes[copy] = Node(nodes[copy].name, nodes[copy].seconds / len(of_hub), nodes[copy].num_bytes)
    return Loosened(Problem(tuple(nodes), tuple(edges), problem.budget), copies)


def lower_bound(problem: Problem, multiplier: float, goal: float) -> float:
    """A bound on the seconds of every choice within the budget, by eliminations alone; -inf where it is too wide.

    L(λ) of the problem itself where that is cheap or there are no hubs, else of the loosened one, levelled until the
    bound is at `goal` seconds: what is claimed, above which nothing need be proven.
    """
    pruned = prune(problem).problem
    budget = problem.budget or 0
    price = 0.0 if problem.budget is None else multiplier
    tables = Tables(pruned)
    elimination = narrow_elimination(pruned, tables)
    loose = loosen(pruned) if elimination is None or elimination.work > CHEAP_WORK else None
    best, levelling = -np.inf, Levelling()
    for _ in range(ROUNDS if loose is not None else 0):
        assert loose is not None
        copied = Tables(loose.problem)
        narrow = narrow_elimination(loose.problem, copied)
        if narrow is None:
            break
        weighted = evaluate(narrow, copied.weighted(price))
        bound = optimum(narrow, weighted) - price * budget
        best = max(best, bound)
        if best >= goal or not np.isfinite(bound):
            return best
        grid = GRID * (abs(bound) + price * budget)
        found = excesses(loose.problem, narrow, weighted, grid=grid)
        loose = levelling.next(loose, found, bound, grid)
    if elimination is not None:
        best = optimum(elimination, evaluate(elimination, tables.weighted(price))) - price * budget
    return best
