"""Min-plus variable elimination: the exact optimum of a problem without a memory row, in time exponential in treewidth.

Nodes are eliminated one after the other. Eliminating v collects the tables that mention v (its *bucket*), adds them
up and minimises over v. The result is a table over v's remaining neighbours, the *message*, which falls into a later
bucket:

    message_v(neighbours) = min_v Σ tables of bucket v            (Dechter, Bucket Elimination, 1999)

Models repeat their layers, so most buckets compute the same message. Which ones is known before any number is: equal
inputs in equal places. Such a computation is one `EliminationStep`, done once however many buckets share it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from autopar.solver.deadline import NEVER, check
from autopar.solver.order import elimination_order, separators
from autopar.solver.problem import Floats, Integers, Problem, only_bytes

MAX_TABLE = 1_000_000_000  # entries a bucket may span; it is built in blocks, and its message is far smaller
MAX_BYTES = 1_500_000_000  # of all messages together
BYTES = 8  # of an entry
SURROUNDINGS = 3  # edges: nodes whose surroundings are equal so far are of one kind
MAX_WORK = 20_000_000_000  # entries of all steps together: about a minute on one core
CHEAP_WORK = 100_000_000  # entries: less time than to look for another order
FAIR_WORK = 5_000_000_000  # entries of an order that keeps layers apart: others are seldom much better
ORDERS = ((True, False), (False, False), (False, True))  # whether they are balanced, and by growth
BLOCK = 40_000  # entries of a message computed at once: 320 KB, which stays in the cache
SMALL = 1 << 14  # entries of a bag that is built whole
SHARED = 1 << 20  # entries of a bag: with more, threads share its blocks
MAX_THREADS = 8  # they wait for each other's Python: more are hardly faster


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
        """Of the messages of all steps, which an evaluation keeps."""
        return BYTES * sum(math.prod(step.sizes[1:]) for step in self.steps)

    @property
    def largest(self) -> int:
        """Entries of the largest bucket."""
        return max((math.prod(step.sizes) for step in self.steps), default=0)


_Table = tuple[Floats, tuple[Integers | None, ...]]
"""Seconds, and bytes in one problem after the other."""


class Tables:
    """The distinct tables of a problem: equal menus and equal edges are one table, whatever node they belong to.

    `others` are the same problem with other bytes: equal tables have equal bytes in all of them.
    """

    def __init__(self, problem: Problem, others: Sequence[Problem] = ()) -> None:
        numbers: dict[object, int] = {}
        by_object: dict[tuple[object, ...], int] = {}  # the problems hold the arrays: an id names one of them
        content = _ContentKeys()
        self._menus: list[_Table] = []
        self._matrices: list[_Table] = []
        self.of_node: list[int] = []
        self.of_edge: list[int] = []
        for node, *more in zip(problem.nodes, *(each.nodes for each in others), strict=True):
            held = (node.num_bytes, *(each.num_bytes for each in more))
            objects = (id(node.seconds), *map(id, held))
            if objects not in by_object:
                key = (content.key(node.seconds), *map(content.key, held))
                if key not in numbers:
                    numbers[key] = len(self._menus)
                    self._menus.append((node.seconds, held))
                by_object[objects] = numbers[key]
            self.of_node.append(by_object[objects])
        by_object.clear()
        for edge, *more in zip(problem.edges, *(each.edges for each in others), strict=True):
            of_edge = (edge.num_bytes, *(each.num_bytes for each in more))
            objects = (id(edge.seconds), *map(id, of_edge), edge.is_loop)
            if objects not in by_object:
                # An edge from a node to itself is chosen on its diagonal.
                by_bytes = [None if each is None else content.key(each) for each in of_edge]
                edge_key = (content.key(edge.seconds), *by_bytes, edge.is_loop)
                if edge_key not in numbers:
                    numbers[edge_key] = len(self._menus) + len(self._matrices)
                    table = edge.seconds, of_edge
                    if edge.is_loop:
                        table = np.diagonal(edge.seconds), tuple(map(_diagonal, of_edge))
                    self._matrices.append(table)
                by_object[objects] = numbers[edge_key]
            self.of_edge.append(by_object[objects])

    def __len__(self) -> int:
        return len(self._menus) + len(self._matrices)

    def kinds(self, problem: Problem) -> list[int]:
        """A number per node, the same for nodes with equal tables and surroundings (Weisfeiler & Leman 1968)."""
        at: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
        for number, edge in enumerate(problem.edges):
            for place, end in enumerate(edge.ends):
                at[end].append((number, place))
        kinds = self.of_node
        for _ in range(SURROUNDINGS):
            of_edge = [
                (table, *[kinds[end] for end in e.ends]) for table, e in zip(self.of_edge, problem.edges, strict=True)
            ]
            numbers: dict[object, int] = {}
            kinds = [
                numbers.setdefault((kind, *sorted((of_edge[number], place) for number, place in around)), len(numbers))
                for kind, around in zip(kinds, at, strict=True)
            ]
        return kinds

    def costs(self) -> list[_Table]:
        """Seconds of every table, and its bytes in each of the problems; None: no bytes."""
        return [*self._menus, *self._matrices]

    def weighted(self, *prices: float) -> list[Floats]:
        """The tables of the seconds and the bytes of each problem at its price (in seconds per byte)."""
        return [
            seconds + paid if (paid := _paid(held, prices)) is not None else seconds for seconds, held in self.costs()
        ]

    def bytes_only(self) -> list[Floats]:
        """The tables of the bytes alone, which keep what is forbidden; exact below 2**53 bytes."""
        return [only_bytes(seconds, held[0]) for seconds, held in self.costs()]


def _paid(held: tuple[Integers | None, ...], prices: tuple[float, ...]) -> Floats | None:
    """What the bytes of each problem cost together at its price; None where they cost nothing."""
    parts = [price * each for price, each in zip(prices, held, strict=True) if each is not None and price]
    return sum(parts[1:], parts[0]).astype(np.float64, copy=False) if parts else None


def _diagonal(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else np.diagonal(array)


def compile_elimination(problem: Problem, tables: Tables, balanced: bool, by_growth: bool = False) -> Elimination:
    """Choose an order and find the steps its buckets share; computes no table.

    `balanced` eliminates shallow nodes first: larger buckets, but equal layers collapse into a few steps. `by_growth`
    eliminates what enlarges the tables least instead, which keeps hubs of many layers for the end.
    """
    order = elimination_order(problem, balanced, by_growth)
    assert order is not None, "an order without a limit on its buckets"
    return compile_order(problem, tables, order)


def compile_order(problem: Problem, tables: Tables, order: Sequence[int]) -> Elimination:
    sizes = [node.num_strategies for node in problem.nodes]
    position = {node: place for place, node in enumerate(order)}
    factors: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in order]
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
        # Axes in order of first mention: equal buckets of different layers then get equal steps.
        bag = tuple(dict.fromkeys((node, *itertools.chain.from_iterable(scope for _, scope in factors[place]))))
        axis = {member: number for number, member in enumerate(bag)}
        inputs = [(table, tuple(axis[member] for member in scope)) for table, scope in factors[place]]
        inputs.sort(key=lambda entry: math.prod(sizes[bag[a]] for a in entry[1]))
        step = EliminationStep(tuple(sizes[member] for member in bag), tuple(inputs))
        number = steps.setdefault(step, len(steps))
        buckets.append(Bucket(bag, number, tuple(edges[place])))
        if len(bag) > 1:
            factors[min(position[member] for member in bag[1:])].append((len(tables) + number, bag[1:]))
    return Elimination(tuple(steps), tuple(buckets), len(tables))


def narrow_elimination(problem: Problem, tables: Tables) -> Elimination | None:
    """An order that is cheap, or the cheapest of some; None if the graph is too wide for the time or memory of all."""
    last = separators(problem)
    found: list[Elimination] = []
    for balanced, by_growth, kept in (*[(True, False, last)] * bool(last), *((*each, ()) for each in ORDERS)):
        order = elimination_order(problem, balanced, by_growth, kept, MAX_TABLE)
        if order is None:
            continue
        compiled = compile_order(problem, tables, order)
        if compiled.num_bytes > MAX_BYTES:
            continue
        found.append(compiled)
        if found[-1].work <= (FAIR_WORK if kept else CHEAP_WORK):
            return found[-1]
    return min((each for each in found if each.work <= MAX_WORK), key=lambda each: each.work, default=None)


def evaluate(elimination: Elimination, tables: Sequence[Floats], deadline: float = NEVER) -> list[Floats]:
    """The given tables followed by the message of every step; TimeLimitError where that takes until the deadline."""
    found = list(tables)
    with ThreadPoolExecutor(num_threads()) as pool:  # its threads begin with the first large bag
        for step in elimination.steps:
            check(deadline)
            found.append(_message(step, found, pool))
    return found


def num_threads() -> int:
    """How many threads compute the message of a large bag: as many as the process has cores, up to MAX_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


def optimum(elimination: Elimination, tables: Sequence[Floats]) -> float:
    """The least sum, from the tables that `evaluate` returned; inf if everything is forbidden."""
    roots = (bucket for bucket in elimination.buckets if len(bucket.bag) == 1)
    return sum(float(tables[elimination.num_tables + bucket.step]) for bucket in roots)


def choices_of(elimination: Elimination, tables: Sequence[Floats]) -> tuple[int, ...]:
    """A choice per node that attains the optimum, from the tables of `evaluate`; the first index among equals."""
    chosen = [0] * len(elimination.buckets)
    best: dict[tuple[int, ...], int] = {}  # of a step, where its neighbours are chosen: equal layers choose alike
    for bucket in reversed(elimination.buckets):
        node, *neighbours = bucket.bag
        given = (bucket.step, *[chosen[other] for other in neighbours])
        if given not in best:
            row: Floats | float = 0.0
            for table, axes in elimination.steps[bucket.step].inputs:
                row = row + tables[table][tuple(given[axis] if axis else slice(None) for axis in axes)]
            best[given] = int(np.argmin(row))
        chosen[node] = best[given]
    return tuple(chosen)


def bag_sum(step: EliminationStep, tables: Sequence[Floats], out: Floats | None = None) -> Floats:
    """All tables of a step added up over its bag, in the memory of `out` (one dim) if given."""
    if out is None:
        out = np.empty(math.prod(step.sizes))
    total = out[: math.prod(step.sizes)].reshape(step.sizes)
    return _add_into(total, _partial_sums(step, tables))


def _message(step: EliminationStep, tables: Sequence[Floats], pool: ThreadPoolExecutor) -> Floats:
    """The minimum over the bag's first axis, without building the whole bag where it is large."""
    if math.prod(step.sizes) <= SMALL or len(step.sizes) == 1:
        return np.asarray(bag_sum(step, tables).min(axis=0))
    parts = _partial_sums(step, tables)
    found = np.empty(step.sizes[1:])

    def fill(place: tuple[slice, ...]) -> None:
        block = found[place]
        buffer = np.empty(block.shape)
        cut = [_at(part, place) for part in parts]
        _add_into(block, [part[0] for part in cut])
        for choice in range(1, step.sizes[0]):
            row = _add_into(buffer, [part[choice if len(part) > 1 else 0] for part in cut])
            np.minimum(block, row, out=block)

    is_large = math.prod(step.sizes) > SHARED
    for _ in pool.map(fill, _blocks(found.shape)) if is_large else map(fill, _blocks(found.shape)):
        pass
    return found


def _blocks(sizes: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Where the blocks of a message lie: as many rows of its first dim as fit, or of one row equal parts."""
    row = math.prod(sizes[1:])
    height = max(1, BLOCK // row)
    for first in range(0, sizes[0], height):
        rows = slice(first, first + height)
        if row <= BLOCK:
            yield (rows,)
        else:
            width = math.ceil(sizes[1] / math.ceil(row / BLOCK))
            yield from ((rows, slice(start, start + width)) for start in range(0, sizes[1], width))


def _at(part: Floats, place: tuple[slice, ...]) -> Floats:
    """A broadcast part of a bag, where its message has a block."""
    return part[:, *(slice(None) if size == 1 else rows for size, rows in zip(part.shape[1:], place, strict=False))]


def _add_into(total: Floats, parts: Sequence[Floats]) -> Floats:
    """Add broadcast parts up in place."""
    if len(parts) == 1:
        total[...] = parts[0]
        return total
    np.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total += part
    return total


def _partial_sums(step: EliminationStep, tables: Sequence[Floats]) -> list[Floats]:
    """The tables of a step, broadcast to its bag, added up as far as that leaves them smaller than the bag."""
    whole = math.prod(step.sizes)
    parts: list[Floats] = []
    for number, axes in step.inputs:
        table = tables[number].transpose(sorted(range(len(axes)), key=axes.__getitem__))
        table = table.reshape([step.sizes[axis] if axis in axes else 1 for axis in range(len(step.sizes))])
        for place, part in enumerate(parts):
            if math.prod(map(max, part.shape, table.shape)) < whole or table.shape == part.shape:
                parts[place] = part + table
                break
        else:
            parts.append(table)
    return parts


class _ContentKeys:
    """Keys of arrays by content, computed once per object."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[object, tuple[object, ...]]] = {}

    def key(self, array: np.ndarray) -> tuple[object, ...]:
        if id(array) not in self._by_object:
            digest = hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()
            # The array is kept with its key: an id means something only while the object lives.
            self._by_object[id(array)] = (array, (array.shape, array.dtype.str, digest))
        return self._by_object[id(array)][1]
