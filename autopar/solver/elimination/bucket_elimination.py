"""Min-plus variable elimination: the exact optimum of a problem without a memory row, in time exponential in treewidth.

Nodes are eliminated one after the other. Eliminating v collects the tables that mention v (its *bucket*), adds them
up and minimises over v. The result is a table over v's remaining neighbours, the *message*, which falls into a later
bucket:

    message_v(neighbours) = min_v Σ tables of bucket v            (Dechter, Bucket Elimination, 1999)

Models repeat their layers, so most buckets compute the same message. Which ones is known before any number is: equal
inputs in equal places. Such a computation is one `EliminationStep`, done once however many buckets share it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.deadline import check_whole
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.order import elimination_order
from autopar.solver.problem import Problem

MAX_BYTES = 1_500_000_000  # bytes of all messages together
CHEAP_WORK = 100_000_000  # entries: less time than to look for another order
EXPENSIVE_WORK = 5_000_000_000  # entries of all steps together, a quarter of a minute on a core: messages take less
ORDERS = ((True, False), (False, False), (False, True))  # (balanced, by growth)

Factor = tuple[int, tuple[int, ...]]
"""A table by number, and the nodes that its dims are of."""


@dataclass(frozen=True, slots=True)
class EliminationStep:
    """Add tables up over a bag (the eliminated node on axis 0) of these sizes, and minimise over axis 0."""

    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    """(number of a table, the bag's axis of each of its dims), smallest first."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The elimination of the first node of `bag`; its message is over the others."""

    bag: tuple[int, ...]
    step: int
    edges: tuple[int, ...]
    """Edges of the problem (by position) whose table lies in this bucket."""


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """An order of elimination, compiled: the distinct steps, and the buckets that use them, first eliminated first."""

    steps: tuple[EliminationStep, ...]
    buckets: tuple[Bucket, ...]
    num_tables: int
    """Tables of the problem itself; the message of step i is table num_tables + i."""

    @property
    def work(self) -> int:
        """Entries computed by one evaluation."""
        return sum(math.prod(step.sizes) for step in self.steps)

    @property
    def num_bytes(self) -> int:
        """Bytes of the messages of all steps, which an evaluation keeps."""
        return np.dtype(np.float64).itemsize * sum(math.prod(step.sizes[1:]) for step in self.steps)

    @property
    def largest(self) -> int:
        """Entries of the largest bucket."""
        return max((math.prod(step.sizes) for step in self.steps), default=0)


def compile_elimination(problem: Problem, tables: Tables, balanced: bool, by_growth: bool = False) -> Elimination:
    """Choose an order and find the steps its buckets share; computes no table.

    `balanced` eliminates shallow nodes first: larger buckets, but equal layers collapse into a few steps. `by_growth`
    eliminates what enlarges the tables least instead, which leaves shared reshards of many layers for the end.
    """
    order = elimination_order(problem, balanced, by_growth)
    assert order is not None, "an order without a limit on its buckets"
    return compile_order(problem, tables, order)


def compile_order(problem: Problem, tables: Tables, order: Sequence[int]) -> Elimination:
    sizes = [node.num_strategies for node in problem.nodes]
    position = {node: place for place, node in enumerate(order)}
    factors: list[list[Factor]] = [[] for _ in order]
    edges: list[list[int]] = [[] for _ in order]
    for node, table in enumerate(tables.of_node):
        factors[position[node]].append((table, (node,)))
    for number, (edge, table) in enumerate(zip(problem.edges, tables.of_edge, strict=True)):
        place = min(position[end] for end in edge.ends)
        edges[place].append(number)
        factors[place].append((table, edge.ends[:1] if edge.is_loop else edge.ends))
    steps: dict[EliminationStep, int] = {}
    buckets: list[Bucket] = []
    for place, node in enumerate(order):
        check_whole()
        bag, step = bag_of(node, factors[place], sizes)
        number = steps.setdefault(step, len(steps))
        buckets.append(Bucket(bag, number, tuple(edges[place])))
        if len(bag) > 1:
            factors[min(position[member] for member in bag[1:])].append((len(tables) + number, bag[1:]))
    return Elimination(tuple(steps), tuple(buckets), len(tables))


def bag_of(node: int, factors: Sequence[Factor], sizes: Sequence[int]) -> tuple[tuple[int, ...], EliminationStep]:
    """Return a node with all that its factors depend on, and the step that eliminates it."""
    # Axes in order of first mention: equal buckets of different layers then get equal steps.
    bag = tuple(dict.fromkeys((node, *itertools.chain.from_iterable(scope for _, scope in factors))))
    axis = {member: number for number, member in enumerate(bag)}
    inputs = [(table, tuple(axis[member] for member in scope)) for table, scope in factors]
    inputs.sort(key=lambda entry: math.prod(sizes[bag[a]] for a in entry[1]))
    return bag, EliminationStep(tuple(sizes[member] for member in bag), tuple(inputs))


def narrow_elimination(problem: Problem, tables: Tables, most: float = EXPENSIVE_WORK) -> Elimination | None:
    """Return an order that is cheap, or the cheapest of some; None if all of them take more than so many entries."""
    found: list[Elimination] = []
    for balanced, by_growth in ORDERS:
        order = elimination_order(problem, balanced, by_growth, most)
        if order is None:
            continue
        compiled = compile_order(problem, tables, order)
        if compiled.work <= most and compiled.num_bytes <= MAX_BYTES:
            found.append(compiled)
        if compiled.work <= CHEAP_WORK:
            break
    return min(found, key=lambda each: each.work, default=None)
