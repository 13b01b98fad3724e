"""A problem that bounds another: some nodes are copies that may differ, and share what their node costs.

    min Σ …  with v_1, v_2, …, v_K free to differ   ≤   min Σ …  with v_1 = v_2 = … = v_K

whatever the shares θ_k of the copies are, as long as Σ_k θ_k(v) = seconds(v) for every strategy v (dual decomposition;
Lagrangian splitting, Guignard & Kim 1987). The shares are levelled by min-marginals m_k, so that what one copy gains by
differing another pays:

    θ_k(v) += step · (mean_j m_j(v) - m_k(v))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.min_marginals import Excesses
from autopar.solver.problem import Edge, Floats, Node, Problem


@dataclass(frozen=True, slots=True)
class Loosened:
    """A problem with copies of nodes; the other nodes, and the first copies, keep their numbers."""

    problem: Problem
    copies: Mapping[int, tuple[int, ...]]
    """Node → its copies."""
    order: tuple[int, ...]
    """An order in which the problem is narrow."""

    def excess(self, found: Excesses, node: int) -> Floats:
        """What each strategy of a node of the original problem costs above the bound at least."""
        copies = self.copies.get(node)
        return found.of_node[node] if copies is None else np.max([found.of_node[copy] for copy in copies], axis=0)

    def agreement(self, found: Excesses) -> dict[int, int]:
        """For every node with copies, the strategy that these want together."""
        sums = {node: np.sum([found.of_node[copy] for copy in copies], axis=0) for node, copies in self.copies.items()}
        return {node: int(np.argmin(each)) for node, each in sums.items()}

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
        return Loosened(Problem(tuple(nodes), self.problem.edges, self.problem.budget), self.copies, self.order)


def with_copies(
    problem: Problem, origins: Sequence[int], ends: Sequence[Sequence[int]], order: Sequence[int] = ()
) -> Loosened:
    """The problem with nodes for `origins` (node, or copy → node), and edges between these; shares are equal."""
    nodes = [problem.nodes[origin] for origin in origins]
    edges = tuple(
        [
            edge if tuple(at) == edge.ends else Edge(tuple(at), edge.seconds, edge.num_bytes)
            for edge, at in zip(problem.edges, ends, strict=True)
        ]
    )
    copies_of: defaultdict[int, list[int]] = defaultdict(list)
    for copy, origin in enumerate(origins):
        copies_of[origin].append(copy)
    copies = {node: tuple(each) for node, each in copies_of.items() if len(each) > 1}
    for each in copies.values():
        for number, copy in enumerate(each):
            before = nodes[copy]
            rest = before.num_bytes % len(each) if number == 0 else 0
            nodes[copy] = Node(before.name, before.seconds / len(each), before.num_bytes // len(each) + rest)
    return Loosened(Problem(tuple(nodes), edges, problem.budget), copies, tuple(order))
