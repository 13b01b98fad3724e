"""Graphs that are wide because of hubs, nodes with many neighbours: each neighbour has a copy of its own.

The output of an encoder, a position bias or an embedding of the time enters every layer, and its node is in every bag
of an elimination. Models repeat their layers, the copies want the same, and one or two rounds of levelling close the
gap or leave few strategies of the hubs, with which the graph is narrow as it is.
"""

from __future__ import annotations

from autopar.solver.problem import Problem
from autopar.solver.relaxation.loosened import Loosened, with_copies

MANY = 8  # neighbours: a node with more is a hub
FEW = 3  # strategies: a node of no more (how a segment is computed again) does not make bags large


def hubs_apart(problem: Problem) -> Loosened | None:
    """Give every neighbour of a hub a copy of it; None where there is no hub."""
    around: list[set[int]] = [set() for _ in problem.nodes]
    for edge in problem.edges:
        for end in edge.ends:
            around[end].update(edge.ends)
    hubs = [
        node
        for node, neighbours in enumerate(around)
        if len(neighbours - {node}) > MANY and problem.nodes[node].num_strategies > FEW
    ]
    if not hubs:
        return None
    origins = list(range(len(problem.nodes)))
    copy_for: dict[int, dict[int, int]] = {hub: {} for hub in hubs}
    ends: list[list[int]] = []
    for edge in problem.edges:
        at = list(edge.ends)
        for place, end in enumerate(edge.ends):
            if end in copy_for and not edge.is_loop:
                neighbour = next(other for other in edge.ends if other != end)
                at[place] = copy_for[end].setdefault(neighbour, len(origins) if copy_for[end] else end)
                if at[place] == len(origins):
                    origins.append(end)
        ends.append(at)
    return with_copies(problem, origins, ends)
