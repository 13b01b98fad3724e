"""Exact reductions: a smaller problem with the same optimum, and the way back.

pruning      forbidden strategies are left out, and edges to what is decided: a node that is left with one strategy
             costs its neighbours a known time, and ties nothing together; the numbers of the nodes stay
reduction    a node whose allowed strategies all take the same bytes, on its edges too, can be minimised out without
             the memory row noticing: with one neighbour it leaves costs on that neighbour, with two an edge between
             them; with a single allowed strategy it leaves costs on any number of neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.problem import Edge, Floats, Integers, Node, Numbers, Problem, cut_table

MOST_MADE = 100_000_000  # entries of tables that reductions make: beyond, no pair of neighbours gets a further one
NO_BYTES = tuple(np.zeros((1,) * ndim, dtype=np.int64) for ndim in range(4))
"""Zero byte tables, by the number of dims."""
NO_SECONDS = np.zeros(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Removed:
    """A node minimised out: its costs, and its edges as (neighbour, seconds[k_node, k_neighbour])."""

    node: int
    seconds: Floats
    edges: tuple[tuple[int, Floats], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """The smaller problem, the seconds it leaves out, and what is needed to extend its solutions."""

    problem: Problem
    constant: float
    kept: tuple[int, ...]
    """Position in the original problem of each node of the smaller one."""
    strategies: tuple[np.ndarray, ...]
    """Position of each strategy of each kept node among its original candidates; forbidden ones are gone."""
    removed: tuple[_Removed, ...]

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return a solution of the original problem, equally good, from one of the smaller problem."""
        found = {node: int(self.strategies[i][choices[i]]) for i, node in enumerate(self.kept)}
        for each in reversed(self.removed):
            row = each.seconds
            for neighbour, seconds in each.edges:
                row = row + seconds[:, found[neighbour]]
            found[each.node] = int(np.argmin(row))
        return tuple(found[node] for node in range(len(found)))

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...] | None:
        """Return the part of a solution of the original problem that the smaller one decides, if it still allows it."""
        found = []
        for node, strategies in zip(self.kept, self.strategies, strict=True):
            place = int(np.searchsorted(strategies, choices[node]))
            if place == len(strategies) or strategies[place] != choices[node]:
                return None
            found.append(place)
        return tuple(found)


def reduce_problem(problem: Problem) -> Reduction:
    """Minimise out whatever can be without growing the problem."""
    state = _State(problem)
    waiting = list(range(len(problem.nodes)))
    queued = set(waiting)
    while waiting:
        node = waiting.pop()
        queued.discard(node)
        if node in state.around and state.removable(node):
            touched = state.remove(node)
            new = [other for other in touched if other not in queued]
            waiting.extend(new)
            queued.update(new)
    return state.result()


class _State:
    """A problem being reduced: costs per node, one merged edge per pair of neighbours, and the edges of three ends.

    Equal arrays reduce to one array (`_Made`), so that equal layers take the time and the memory of one.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.made = _Made()
        second_lists: dict[bytes, Floats] = {}
        byte_lists: dict[bytes, Integers] = {}
        self.seconds = [second_lists.setdefault(node.seconds.tobytes(), node.seconds) for node in problem.nodes]
        self.num_bytes = [byte_lists.setdefault(node.num_bytes.tobytes(), node.num_bytes) for node in problem.nodes]
        self.around: dict[int, dict[int, _Tables]] = {node: {} for node in range(len(problem.nodes))}
        self.high: dict[int, list[tuple[tuple[int, ...], _Tables]]] = {node: [] for node in range(len(problem.nodes))}
        self.removed: list[_Removed] = []
        self.constant = 0.0
        self.constant_bytes = 0
        for edge in problem.edges:
            edge_bytes = NO_BYTES[edge.seconds.ndim] if edge.num_bytes is None else edge.num_bytes
            if edge.is_loop:
                diagonals = [self.made(np.diagonal, each) for each in (edge.seconds, edge_bytes)]
                self._charge(edge.ends[0], *diagonals)
            elif len(edge.ends) == 2:
                self._connect(*edge.ends, (edge.seconds, edge_bytes))
            else:
                entry = edge.ends, (edge.seconds, edge_bytes)
                for end in edge.ends:
                    self.high[end].append(entry)

    def removable(self, node: int) -> bool:
        """Return whether the node can be minimised out: one strategy is left, or few neighbours and constant bytes."""
        allowed = self.made(_allowed, self.seconds[node])
        if len(allowed) == 1:
            return True
        if self.high[node] or len(self.around[node]) > 2:
            return False
        if len(self.around[node]) == 2 and self.made.num_entries > MOST_MADE:
            return False
        return self.problem.budget is None or (
            len(allowed) > 0
            and self.made(_constant, self.num_bytes[node], allowed)
            and all(self.made(_constant, edge_bytes, allowed) for _, edge_bytes in self.around[node].values())
        )

    def remove(self, node: int) -> tuple[int, ...]:
        """Minimise a node out and return the neighbours it had."""
        seconds = self.seconds[node]
        allowed = self.made(_allowed, seconds)
        touched = self._narrow(node, int(allowed[0])) if self.high[node] else ()
        edges = tuple(sorted(self.around.pop(node).items(), key=lambda entry: entry[0]))
        for neighbour, _ in edges:
            del self.around[neighbour][node]
        if len(allowed) and self.problem.budget is not None:
            self.constant_bytes += int(self.num_bytes[node][allowed[0]])
            for neighbour, (_, edge_bytes) in edges:
                self._charge(neighbour, NO_SECONDS, self.made(_first_row, edge_bytes, allowed))
        self.removed.append(_Removed(node, seconds, tuple((neighbour, tables[0]) for neighbour, tables in edges)))
        if len(allowed) == 1:
            self.constant += float(seconds[allowed[0]])
            for neighbour, (matrix, _) in edges:
                self._charge(neighbour, self.made(_first_row, matrix, allowed), NO_BYTES[1])
        elif not edges:
            self.constant += float(seconds.min())
        elif len(edges) == 1:
            ((neighbour, (matrix, _)),) = edges
            self._charge(neighbour, self.made(_least_of_one, seconds, matrix), NO_BYTES[1])
        else:
            (one, (left, _)), (other, (right, _)) = edges
            self._connect(one, other, (self.made(_least_of_two, seconds, left, right), NO_BYTES[2]))
        return (*touched, *(neighbour for neighbour, _ in edges))

    def _narrow(self, node: int, choice: int) -> tuple[int, ...]:
        """Turn the edges of three ends at a decided node into edges between the other two."""
        touched: list[int] = []
        for entry in self.high[node]:
            ends, tables = entry
            place = ends.index(node)
            seconds, edge_bytes = (self.made(_TAKEN[place], each, self.made.number(choice)) for each in tables)
            one, other = (end for end in ends if end != node)
            for end in (one, other):
                self.high[end] = [each for each in self.high[end] if each is not entry]
            self._connect(one, other, (seconds, edge_bytes))
            touched += [one, other]
        self.high[node] = []
        return tuple(touched)

    def result(self) -> Reduction:
        kept = tuple(self.around)
        index = {node: place for place, node in enumerate(kept)}
        equal: dict[bytes, Integers] = {}  # equal rows are one array, so that what is cut by them is
        # A node with nothing left keeps one forbidden strategy, so that the smaller problem is infeasible too.
        rows = (self.made(_allowed, self.seconds[node]) for node in kept)
        rows = (each if len(each) else np.zeros(1, dtype=np.intp) for each in rows)
        strategies = tuple(equal.setdefault(each.tobytes(), each) for each in rows)
        nodes = tuple(
            Node(
                self.problem.nodes[node].name,
                self.made(_rows_of, self.seconds[node], rows),
                self.made(_rows_of, self.num_bytes[node], rows),
            )
            for node, rows in zip(kept, strategies, strict=True)
        )

        def edge(ends: tuple[int, ...], tables: _Tables) -> Edge:
            places = tuple(index[end] for end in ends)
            rows = [strategies[place] for place in places]
            seconds = self.made(_rows_of, tables[0], *rows)
            return Edge(places, seconds, self.made(_cut_bytes, tables[1], tables[0], *rows))

        edges = [
            edge((one, other), tables) for one in kept for other, tables in self.around[one].items() if one < other
        ]
        edges += [edge(ends, tables) for one in kept for ends, tables in self.high[one] if ends[0] == one]
        budget = None if self.problem.budget is None else self.problem.budget - self.constant_bytes
        return Reduction(_limited(nodes, tuple(edges), budget), self.constant, kept, strategies, tuple(self.removed))

    def _charge(self, node: int, seconds: Floats, num_bytes: Integers) -> None:
        self.seconds[node] = self.made(np.add, self.seconds[node], seconds)
        self.num_bytes[node] = self.made(np.add, self.num_bytes[node], num_bytes)

    def _connect(self, one: int, other: int, tables: _Tables) -> None:
        """Add an edge's tables[k_one, k_other] to what lies between the two; seen from both sides."""
        if other in self.around[one]:
            before = self.around[one][other]
            tables = self.made(np.add, before[0], tables[0]), self.made(np.add, before[1], tables[1])
        self.around[one][other] = tables
        self.around[other][one] = self.made(np.transpose, tables[0]), self.made(np.transpose, tables[1])


class _Made:
    """Cache of derived arrays: the same function of the same arrays is computed once, and gives the same object."""

    def __init__(self) -> None:
        self.num_entries = 0
        """Number of entries of all derived arrays."""
        self._found: dict[object, tuple[Any, tuple[Any, ...]]] = {}
        self._numbers: dict[int, Integers] = {}

    def __call__(self, make: Callable[..., Any], *arrays: np.ndarray) -> Any:
        key = (make, *map(id, arrays))
        if key not in self._found:
            made = make(*arrays)
            # The arrays are kept with what was made of them: an id means something only while the object lives.
            self._found[key] = made, arrays
            self.num_entries += made.size if isinstance(made, np.ndarray) and made.base is None else 0
        return self._found[key][0]

    def number(self, value: int) -> Integers:
        """Return a number as an array, always the same one."""
        return self._numbers.setdefault(value, np.array(value))


def _allowed(seconds: Floats) -> Integers:
    return np.flatnonzero(np.isfinite(seconds))


def _constant(edge_bytes: Integers, allowed: Integers) -> bool:
    """Return whether the bytes are the same for all allowed strategies in the first dim."""
    rows = _rows(edge_bytes, allowed)
    return bool((rows == rows[:1]).all())


def _rows(edge_bytes: Numbers, allowed: Integers) -> Numbers:
    return edge_bytes[allowed] if len(edge_bytes) > 1 else edge_bytes


def _first_row(table: Numbers, allowed: Integers) -> Numbers:
    return _rows(table, allowed)[0]


def _least_of_one(seconds: Floats, matrix: Floats) -> Floats:
    """Return the least costs of a node, by the strategies of its only neighbour."""
    return (seconds[:, None] + matrix).min(axis=0)


def _least_of_two(seconds: Floats, left: Floats, right: Floats) -> Floats:
    """Return the least costs of a node, by the strategies of its two neighbours."""
    left = left + seconds[:, None]
    return np.stack([(left[:, i, None] + right).min(axis=0) for i in range(left.shape[1])])


def _taken(place: int) -> Callable[[Any, Integers], Any]:
    """Return a function that fixes one end of a table at a choice; the table may have size one there."""
    return lambda table, choice: np.take(table, int(choice) if table.shape[place] > 1 else 0, axis=place)


_TAKEN = tuple(map(_taken, range(3)))


def _rows_of(table: Numbers, *rows: Integers) -> Numbers:
    return cut_table(table, rows)


def _cut_bytes(edge_bytes: Integers, seconds: Floats, *rows: Integers) -> Integers | None:
    """Return the bytes of an edge, in the shape of its seconds; None where there are none."""
    found = cut_table(np.broadcast_to(edge_bytes, seconds.shape), rows)
    return np.ascontiguousarray(found) if found.any() else None


_Tables = tuple[Floats, Integers]
"""Seconds and bytes of an edge, a dim per end; the bytes may have dims of one where they are the same all along."""


def _limited(nodes: tuple[Node, ...], edges: tuple[Edge, ...], budget: int | None) -> Problem:
    """Return a problem whose limit the nodes left out may already exceed: then nothing is allowed."""
    if budget is not None and budget < 0:
        blocked = Node("limit", np.array([np.inf]), np.zeros(1, dtype=np.int64))
        return Problem((*nodes, blocked), edges, 0)
    return Problem(nodes, edges, budget, is_sound=True)


@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller problem, and which strategies of each node it kept."""

    problem: Problem
    kept: tuple[Integers, ...]

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the original problem from those of the smaller one."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.kept, choices, strict=True))

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the smaller problem from those of the original one, all of which it kept."""
        return tuple(int(np.searchsorted(kept, choice)) for kept, choice in zip(self.kept, choices, strict=True))


def prune(problem: Problem) -> Pruned:
    """Drop forbidden strategies and the edges of decided nodes; every node must have a strategy that is allowed."""
    return prune_each((problem,))[0]


def prune_each(problems: Sequence[Problem]) -> list[Pruned]:
    """Return the same of one problem with a memory row each: they differ in bytes and budgets; equal parts are cut
    once.
    """
    first = problems[0]
    allowed = {id(node.seconds): node.seconds for node in first.nodes}
    rows_of = {key: np.flatnonzero(np.isfinite(seconds)) for key, seconds in allowed.items()}
    equal: dict[bytes, Integers] = {}  # equal rows are one array, so that what is cut by them is
    rows_of = {key: equal.setdefault(rows.tobytes(), rows) for key, rows in rows_of.items()}
    kept = tuple([rows_of[id(node.seconds)] for node in first.nodes])
    assert all(len(each) for each in rows_of.values()), "a node without an allowed strategy"
    shared: dict[object, np.ndarray] = {}  # equal candidate lists stay one array, and so do equal edges

    def cut(array: Any, rows: Sequence[Integers], is_loop: bool = False) -> Any:
        """Return the allowed part of a node's costs or a table, without the dims of decided ends."""
        key = (id(array), is_loop, *map(id, rows))
        if key not in shared:
            left = cut_table(array, rows)
            shape = tuple([len(each) for each in rows if len(each) > 1])
            shared[key] = left if is_loop or array.ndim == 1 else left.reshape(shape)
        return shared[key]

    seconds = [cut(node.seconds, (each,)) for node, each in zip(first.nodes, kept, strict=True)]
    num_bytes = [[cut(n.num_bytes, (each,)) for n, each in zip(p.nodes, kept, strict=True)] for p in problems]
    edges: list[list[Edge]] = [[] for _ in problems]
    for edge, *others in zip(*(each.edges for each in problems), strict=True):
        rows = [kept[end] for end in edge.ends]
        open_ends = tuple([end for end, each in zip(edge.ends, rows, strict=True) if len(each) > 1])
        ends = edge.ends if edge.is_loop else open_ends
        cost = cut(edge.seconds, rows, edge.is_loop)
        edge_bytes = [
            None if each.num_bytes is None else cut(each.num_bytes, rows, edge.is_loop) for each in (edge, *others)
        ]
        if len(ends) > 1:
            for of_problem, each in zip(edges, edge_bytes, strict=True):
                of_problem.append(Edge(ends, cost, each))
            continue
        node = ends[0] if ends else edge.ends[0]
        seconds[node] = seconds[node] + cost
        for of_problem, each in zip(num_bytes, edge_bytes, strict=True):
            if each is not None:
                of_problem[node] = of_problem[node] + each
    found = []
    for problem, of_nodes, of_edges in zip(problems, num_bytes, edges, strict=True):
        nodes = tuple([Node(node.name, *each) for node, *each in zip(first.nodes, seconds, of_nodes, strict=True)])
        found.append(Pruned(Problem(nodes, tuple(of_edges), problem.budget, is_sound=True), kept))
    return found


def with_fixed(problem: Problem, choices: Mapping[int, int]) -> Problem:
    """Return the problem with some nodes fixed at a strategy; -1 is the first that is allowed."""
    nodes = list(problem.nodes)
    for number, choice in choices.items():
        node = nodes[number]
        edge_bytes = choice if choice >= 0 else int(np.flatnonzero(np.isfinite(node.seconds))[0])
        seconds = np.where(np.arange(node.num_strategies) == edge_bytes, node.seconds, np.inf)
        nodes[number] = Node(node.name, seconds, node.num_bytes)
    return Problem(tuple(nodes), problem.edges, problem.budget, is_sound=True)
