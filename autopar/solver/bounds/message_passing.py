"""Bounds for graphs of any width: costs that are moved between nodes and edges until no more is gained by it.

    min Σ_v θ_v(x_v) + Σ_e θ_e(x_e)   ≥   Σ_v min θ_v + Σ_e min θ_e

A message m_ev(x_v) moves cost from an edge to one of its nodes: it changes no sum, and raises the right side if chosen
well. Nodes are visited in their order and back, in turns. A node collects what each of its edges costs at least for
each strategy, and hands all of it on, in equal shares, to the edges that lead further (TRW-S, Kolmogorov 2006; for
edges of three nodes SRMP, Kolmogorov 2015):

    θ_v += Σ_e min_{x_e \\ x_v} θ_e,      θ_e += θ_v / max(edges from before, edges that lead further)

The bound never falls, and ends near that of the ILP's linear relaxation, which without a memory row is nearly always
the optimum itself. All this is done on the core of a graph (`core`): parts of low treewidth are exact. Choices are read
off during a sweep: each node takes the best strategy given the nodes before it and the messages of those behind it.
Once that has ended in something forbidden, only such are taken as leave all nodes behind them a strategy (`domains`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.bounds.core import core_of
from autopar.solver.bounds.domains import Domains
from autopar.solver.deadline import NEVER, check
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate, fill_in
from autopar.solver.problem import Floats, Problem


@dataclass(frozen=True, slots=True)
class _Visit:
    """A node in its turn, and its edges: number, place of the node among their ends, whether others come before it in
    this direction, whether others come after it, and the places of the ends that are before it."""

    node: int
    edges: tuple[tuple[int, int, bool, bool, tuple[int, ...]], ...]
    share: float
    """Share of a node's costs that goes to each edge that leads further."""
    rest: float
    """Share of a node's costs that stays with the node."""


class MessagePassing:
    """Costs of a problem at prices of memory, as messages move them; every strategy needs a compatible neighbour's.

    The problems are one with a memory row each: they differ in bytes and budgets. Raises TimeLimitError, after which it
    must not be used, where a sweep takes until the deadline.
    """

    def __init__(self, problems: Sequence[Problem], deadline: float = NEVER) -> None:
        problem = self.problem = problems[0]
        self.deadline = deadline
        self._tables = Tables(problem, problems[1:])
        self._core = core_of(problem, self._tables)
        sizes = [node.num_strategies for node in problem.nodes]
        self._ends = [joint.ends for joint in self._core.joints]
        self._sent = [[np.zeros(sizes[end]) for end in ends] for ends in self._ends]
        self._left: dict[int, Floats] = {node: np.zeros(sizes[node]) for node in self._core.nodes}
        self._own: dict[int, Floats] = dict(self._left)
        at: dict[int, dict[int, int]] = {node: {} for node in self._core.nodes}
        for number, ends in enumerate(self._ends):
            for place, end in enumerate(ends):
                at[end][number] = place
        order = sorted(self._core.nodes)
        self._visits = [_visits(each, at, self._ends) for each in (order, order[::-1])]
        self._costs: list[Floats] = []
        self._evaluated: list[Floats] = []
        self._constant = 0.0
        self._is_fresh = True
        self._reached: list[Floats] = []
        self._is_guarded = False
        """True once forbidden choices were read off; further choices then leave all later nodes a strategy."""
        self._visited: list[int] | None = None
        """Best choices of the core that were read off, by node; zeros for the other nodes."""
        self.bound = -np.inf
        """On seconds + prices · bytes of any choices."""
        self.cost = np.inf
        """Cost of the best choices that were read off."""

    def take_from(self, known: MessagePassing) -> None:
        """Take the messages of the same problem with fewer rows, which is then not to be used any more.

        Rows change no node or joint, and any messages bound any costs.
        """
        assert self._ends == known._ends, "another problem"
        self._sent, self._left, self._own = known._sent, known._left, known._own
        self._visited, self._is_guarded = known._visited, known._is_guarded

    def at(self, *prices: float) -> None:
        """Go on at other prices, one for each row: messages stay, and are as good a start as the prices are near."""
        self._evaluated = evaluate(self._core.elimination, self._tables.weighted(*prices), self.deadline)
        self._constant = sum(float(self._evaluated[table]) for table in self._core.constants)
        for node, tables in zip(self._core.nodes, self._core.own, strict=True):
            own = sum((self._evaluated[table] for table in tables[1:]), self._evaluated[tables[0]])
            allowed = own < np.inf
            changed = np.subtract(own, self._own[node], out=np.full(len(own), np.inf), where=allowed)
            self._left[node] = self._left[node] + changed
            self._own[node] = own
        joined: dict[tuple[tuple[int, tuple[int, ...]], ...], Floats] = {}  # equal nodes share one table
        for joint in self._core.joints:
            if joint.tables not in joined:
                parts = [_spread(self._evaluated[table], axes, len(joint.ends)) for table, axes in joint.tables]
                joined[joint.tables] = np.ascontiguousarray(sum(parts[1:], parts[0]))
        self._costs = [joined[joint.tables] for joint in self._core.joints]
        self._is_fresh, self.bound = True, -np.inf
        self._reached = [np.full(node.num_strategies, -np.inf) for node in self.problem.nodes]
        self.cost = np.inf if self._visited is None else self._cost_of(self._visited)

    def sweep(self) -> None:
        """Pass messages once through all nodes and back; read choices off on the way back."""
        self._sweep(self._visits[0], None)
        choices = [0] * len(self.problem.nodes)
        domains = Domains(self._own, self._ends, self._costs) if self._is_guarded else None
        self._sweep(self._visits[1], choices, domains)
        cost = self._cost_of(choices)
        self._is_guarded = self._is_guarded or cost == np.inf
        if cost < self.cost:
            self._visited, self.cost = choices, cost

    def choices(self) -> tuple[int, ...]:
        """Return the best choices that were read off, completed at these prices; there are some where `cost` is
        finite.
        """
        assert self._visited is not None, "no choices are allowed that were read off"
        found = list(self._visited)
        fill_in(self._core.elimination, found, self._evaluated)
        return tuple(found)

    def _cost_of(self, choices: Sequence[int]) -> float:
        """Return the cost of choices of the core at the prices, given the best choices of the other nodes."""
        own = math.fsum(float(row[choices[node]]) for node, row in self._own.items())
        shared = math.fsum(
            float(costs[tuple([choices[end] for end in ends])])
            for ends, costs in zip(self._ends, self._costs, strict=True)
        )
        return self._constant + own + shared

    def reached(self, most: float) -> list[Floats]:
        """Return a bound at the prices for each strategy of each node, on the choices that take it.

        Bounds above `most` may be infinite.
        """
        found = list(self._reached)
        self._core.spread(found, self._evaluated, most, self.bound)
        return found

    def _sweep(self, visits: Sequence[_Visit], choices: list[int] | None, domains: Domains | None = None) -> None:
        before, bound, is_fresh = self.bound, self._constant, self._is_fresh
        costs, sent, left = self._costs, self._sent, self._left
        for visit in visits:
            check(self.deadline)
            node = visit.node
            gathered, least = left[node], []
            for edge, place, is_reached, _, _ in visit.edges:
                if is_reached or is_fresh:  # else nothing has changed since it was sent
                    each = _least(costs[edge], sent[edge], place)
                    gathered = gathered + (each - sent[edge][place])
                else:
                    each = sent[edge][place]
                least.append(each)
            if not is_fresh:
                np.maximum(self._reached[node], before + (gathered - gathered.min()), out=self._reached[node])
            forbidden = gathered == np.inf if gathered.max() == np.inf else None
            if forbidden is not None:  # by what joints have in common
                gathered = np.where(forbidden, 0.0, gathered)
                least = [np.where(forbidden, np.inf, each) for each in least]
            if choices is not None:
                choices[node] = self._best(visit, least, choices, domains)
            share = visit.share * gathered
            left[node] = visit.rest * gathered
            for (edge, place, _, leads_on, _), each in zip(visit.edges, least, strict=True):
                sent[edge][place] = each - share if leads_on else each
            if forbidden is not None:  # no neighbour is to count on it
                left[node][forbidden] = np.inf
                for edge, place, *_ in visit.edges:
                    sent[edge][place][forbidden] = -np.inf
            bound += float(left[node].min())
        # All that an edge costs at least has gone to the last of its nodes.
        self.bound, self._is_fresh = max(before, bound), False

    def _best(
        self, visit: _Visit, least: Sequence[Floats], choices: Sequence[int], domains: Domains | None = None
    ) -> int:
        row = self._own[visit.node]
        for (edge, place, _, leads_on, before), each in zip(visit.edges, least, strict=True):
            if not before:
                row = row + each
                continue
            ends, costs = self._ends[edge], self._costs[edge]
            given = tuple(choices[end] if axis in before else slice(None) for axis, end in enumerate(ends))
            found = costs[given]
            if leads_on:  # the others have only earlier neighbours left
                left = [axis for axis in range(len(ends)) if axis not in before]
                found = _least(found, [self._sent[edge][axis] for axis in left], left.index(place))
            row = row + found
        taken = None if domains is None else domains.take(visit.node, row)
        return int(np.argmin(row)) if taken is None else taken


def _spread(table: Floats, axes: Sequence[int], num_ends: int) -> Floats:
    """Return a table with a dim for each end, of size one where it does not depend on it."""
    table = table.transpose(sorted(range(len(axes)), key=axes.__getitem__))
    sizes = iter(table.shape)
    return table.reshape([next(sizes) if axis in axes else 1 for axis in range(num_ends)])


def _visits(order: Sequence[int], at: Mapping[int, Mapping[int, int]], ends: Sequence[tuple[int, ...]]) -> list[_Visit]:
    turn = {node: number for number, node in enumerate(order)}
    found = []
    for node in order:
        edges = []
        for edge, place in at[node].items():
            before = tuple(axis for axis, other in enumerate(ends[edge]) if turn[other] < turn[node])
            after = any(turn[other] > turn[node] for other in ends[edge])
            edges.append((edge, place, bool(before), after, before))
        further = sum(leads_on for *_, leads_on, _ in edges)
        share = 1.0 / max(sum(is_reached for _, _, is_reached, _, _ in edges), further, 1)
        found.append(_Visit(node, tuple(edges), share, 1.0 - share * further if further else 1.0))
    return found


def _least(costs: Floats, sent: Sequence[Floats], place: int) -> Floats:
    """Return the least cost of an edge for each strategy of one end, less what it has sent to its other ends."""
    if costs.ndim == 2:
        if place == 0:
            return np.minimum.reduce(costs - sent[1], axis=1)
        return np.minimum.reduce(costs - sent[0][:, None], axis=0)
    others, size = sent[1] if place == 0 else sent[0], costs.shape[place]
    if place == 0:
        others = others[None]
    for axis in range(2 if place == 0 else 1, costs.ndim):
        others = others[..., None] if axis == place else others[..., None] + sent[axis]
    left = costs - others
    if place:
        left = np.minimum.reduce(left.reshape(-1, *costs.shape[place:]), axis=0)
    return left if left.ndim == 1 else np.minimum.reduce(left.reshape(size, -1), axis=1)
