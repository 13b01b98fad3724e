"""Graphs that are wide because of hubs, nodes with many neighbours: a bound that lets each neighbour have its own.

The output of an encoder, a position bias or an embedding of the time enters every layer, and its node is in every bag
of an elimination. Loosened, such a node h is a copy per neighbour, its seconds and bytes shared among the copies:

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

from autopar.solver.elimination import Elimination, Tables, choices_of, evaluate, narrow_elimination, optimum
from autopar.solver.lagrangian import Point, point
from autopar.solver.min_marginals import Excesses, excesses
from autopar.solver.problem import Edge, Floats, Node, Problem
from autopar.solver.reductions.reduction import Pruned, prune, with_fixed

DEAR_WORK = 2_000_000_000  # entries: an elimination of more takes longer than one of the loosened graph
MANY = 8  # neighbours: a node with more is a hub
ROUNDS = 6
WORTHWHILE = 0.5  # of the rest that is open: a round that closes less is the last
GRID = 1e-7  # of the bound: excesses that differ by less are the same
TOLERANCE = 1e-10  # of the seconds: what rounding leaves between a bound and what attains it


class TooWideError(Exception):
    """A problem stays too wide for elimination without its hubs."""


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
                    nodes.append(nodes[end])
        edges.append(edge if tuple(ends) == edge.ends else Edge(tuple(ends), edge.seconds, edge.num_bytes))
    copies = {hub: tuple(copy_for[hub].values()) for hub in hubs}
    for of_hub in copies.values():
        for number, copy in enumerate(of_hub):
            num_bytes = nodes[copy].num_bytes
            rest = num_bytes % len(of_hub) if number == 0 else 0
            nodes[copy] = Node(nodes[copy].name, nodes[copy].seconds / len(of_hub), num_bytes // len(of_hub) + rest)
    return Loosened(Problem(tuple(nodes), tuple(edges), problem.budget), copies)


class Hubs:
    """The least of seconds + price · bytes over a problem with hubs, at one price after the other.

    Shares that fit one price nearly fit the next, and so do the strategies on which the copies agree.
    """

    def __init__(self, problem: Problem, loose: Loosened) -> None:
        self.problem = problem
        self.loose = loose
        self._held: dict[int, int] = {}
        self._narrow: dict[tuple[tuple[int, int], ...], _Narrow | None] = {}

    def least(self, price: float) -> tuple[float, Point | None]:
        """A bound on seconds + price · bytes of any choices, and good ones: the best, where they cost the same.

        Raises TooWideError where even the loosened problem is too wide for elimination.
        """
        best, point_of_best = np.inf, None
        bound, step, start = -np.inf, 1.0, None
        for _ in range(ROUNDS):
            elimination, weighted = self._evaluated(price)
            reached = optimum(elimination, weighted)
            best, point_of_best = min((best, point_of_best), self._with_held(price), key=lambda each: each[0])
            if _is_closed(best, reached) or not np.isfinite(reached):
                return reached, point_of_best
            grid = GRID * abs(reached)
            found = excesses(self.loose.problem, elimination, weighted, grid=grid)
            agreed = self.loose.agreement(found)
            if agreed != self._held:
                self._held = agreed
                best, point_of_best = min((best, point_of_best), self._with_held(price), key=lambda each: each[0])
                if _is_closed(best, reached):
                    return reached, point_of_best
            # Each round starts from the best shares so far, by half the step after one that was too long.
            gained = reached - bound
            if start is None or gained > 0:
                bound, start = reached, (self.loose, found)
            else:
                step /= 2
            if 0 < gained < WORTHWHILE * (best - reached):
                break
            self.loose = start[0].levelled(start[1], grid, step)
        assert start is not None
        self.loose = start[0]
        return bound, point_of_best

    def without(self, price: float, most: float) -> Pruned:
        """The problem without the strategies that no choices of at most `most` (seconds + price · bytes) take."""
        elimination, weighted = self._evaluated(price)
        bound = optimum(elimination, weighted)
        found = excesses(self.loose.problem, elimination, weighted, grid=GRID * abs(bound))
        nodes = (
            Node(
                node.name,
                np.where(self.loose.excess(found, number) > most - bound, np.inf, node.seconds),
                node.num_bytes,
            )
            for number, node in enumerate(self.problem.nodes)
        )
        return prune(Problem(tuple(nodes), self.problem.edges, self.problem.budget))

    def _evaluated(self, price: float) -> tuple[Elimination, list[Floats]]:
        tables = Tables(self.loose.problem)
        elimination = narrow_elimination(self.loose.problem, tables)
        if elimination is None:
            raise TooWideError
        return elimination, evaluate(elimination, tables.weighted(price))

    def _with_held(self, price: float) -> tuple[float, Point | None]:
        """What the best choices cost with the hubs held where the copies last agreed, and these; None if none exist."""
        key = tuple(self._held.items())
        if key not in self._narrow:
            self._narrow[key] = _Narrow.of(prune(with_fixed(self.problem, self._held))) if key else None
        narrow = self._narrow[key]
        found = narrow.best(price) if narrow is not None else None
        if found is None:
            return np.inf, None
        met = point(self.problem, found)
        return met.seconds + price * met.num_bytes, met


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A problem whose hubs are held, ready to be evaluated."""

    pruned: Pruned
    tables: Tables
    elimination: Elimination

    @staticmethod
    def of(pruned: Pruned) -> _Narrow | None:
        tables = Tables(pruned.problem)
        elimination = narrow_elimination(pruned.problem, tables)
        return None if elimination is None else _Narrow(pruned, tables, elimination)

    def best(self, price: float) -> tuple[int, ...] | None:
        """The choices of least seconds + price · bytes in the problem before it was pruned; None: all are forbidden."""
        weighted = evaluate(self.elimination, self.tables.weighted(price))
        if optimum(self.elimination, weighted) == np.inf:
            return None
        return self.pruned.extend(choices_of(self.elimination, weighted))


def _is_closed(seconds: float, bound: float) -> bool:
    return seconds < np.inf and seconds - bound <= TOLERANCE * abs(seconds)


def lower_bound(problem: Problem, multiplier: float) -> float:
    """L(λ): a bound on the seconds of every choice within the budget; -inf where the graph is too wide for it."""
    pruned = prune(problem).problem
    price = 0.0 if problem.budget is None else multiplier
    free = price * (problem.budget or 0)
    tables = Tables(pruned)
    elimination = narrow_elimination(pruned, tables)
    loose = loosen(pruned) if elimination is None or elimination.work > DEAR_WORK else None
    if loose is not None:
        try:
            return _levelled_bound(Hubs(pruned, loose), price) - free
        except TooWideError:
            pass
    return (
        -np.inf if elimination is None else optimum(elimination, evaluate(elimination, tables.weighted(price))) - free
    )


def _levelled_bound(hubs: Hubs, price: float) -> float:
    """The bound at a price alone, to which a search has come from other prices: again from the shares so far."""
    bound, again = -np.inf, hubs.least(price)[0]
    while np.isfinite(again) and not _is_closed(again, bound):
        bound, again = again, max(again, hubs.least(price)[0])
    return again
