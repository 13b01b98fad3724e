"""The solver's problem for a space: candidate strategies, reshard costs, pins, and bytes at some moments of a step.

Nodes are the decisions in their order and, where recomputation may be chosen, one node per segment behind them with the
modes as its strategies. Bytes and seconds that depend on the mode lie on edges between a segment and its calls. The
cost of expert rows above an equal share (`costs.memory.tensor_bytes.uneven_share`) lies on edges between the decision
on their counts and the calls and edges that they pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.costs.memory.lifetimes import Place
from autopar.costs.memory.model import MemoryModel, Modes
from autopar.costs.memory.moments import MemoryRow, PricedMemory
from autopar.costs.memory.resident_parts import bytes_in
from autopar.costs.memory.tensor_bytes import uneven_share
from autopar.costs.space.narrowed import Pins, narrowed
from autopar.costs.space.space import Decision, ExpertRows, Space, TensorEdge
from autopar.solver.deadline import check_whole
from autopar.solver.problem import Edge, Node, Problem

NODE, EDGE, UNEVEN_NODE, UNEVEN_EDGE = range(4)
"""Parts of the bytes of a row: of decisions, of edges, and what uneven expert rows add to either."""
_Parts = tuple[Mapping[int, Modes | None], ...]
"""Bytes by mode, by number in each part; of what has none there may be nothing."""
_Numbers = tuple[frozenset[int], ...]
"""Some numbers of each part."""


@dataclass(frozen=True, slots=True)
class _RowBytes:
    """Bytes in a row."""

    parts: _Parts
    by_mode: _Numbers
    """Numbers of the decisions or edges whose bytes depend on the mode of a segment, for each part."""

    @classmethod
    def of(cls, *parts: Mapping[int, Modes | None]) -> _RowBytes:
        several = (frozenset([n for n, modes in each.items() if modes and len(modes) > 1]) for each in parts)
        return cls(parts, tuple(several))


_Edge = tuple[tuple[int, ...], np.ndarray, tuple[int, int, bool] | None]
"""Ends, seconds, and which bytes: of which part and number, and whether as they are by mode; None: none."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """A problem but for bytes in a row."""

    nodes: list[tuple[str, np.ndarray, np.ndarray | None]]
    """Name, seconds, and bytes; None: those of the decision."""
    edges: list[_Edge]


@dataclass(slots=True)
class _Stated:
    """Problems stated so far, by row, and what they have in common."""

    requested: object
    outline: _Outline
    problems: dict[MemoryRow | None, Problem] = field(default_factory=dict)


class Formulation:
    """States problems about one space; whatever equal calls have in common is computed once."""

    def __init__(self, space: Space, memory: MemoryModel) -> None:
        self.space = space
        self.memory = memory
        self._matrices: dict[object, np.ndarray] = {}
        self._stacks: dict[object, np.ndarray] = {}
        self._row_bytes: dict[MemoryRow | None, _RowBytes] = {}
        self._with_rows = {number for number in space.rows if space.decisions[number].kind == "call"}
        """Calls that have rows of experts."""
        self._last: dict[bool, _Stated] = {}
        """Problems of the last request without memory rows (key True), and of the last one with some (key False)."""
        parameters = space.program.parameter_names
        self._names = [_name(decision, parameters) for decision in space.decisions]
        """Names of the decisions in error messages."""
        self.without_a_limit: dict[object, Any] = {}
        """Cache of answers without a memory limit, by limit, modes and pins."""
        self.near: PricedMemory | None = None
        """Prices of memory of a plan of the same model, under other costs or captured otherwise."""
        self.incumbent: tuple[tuple[int, ...], Mapping[str, str]] | None = None
        """Choices of decisions, and modes of segments, of a plan of the same decisions under other costs."""

    def narrowed(self, pins: Pins) -> tuple[Formulation, Pins]:
        """Return the formulation of the space that pins leave, and the pins that still exclude some (`narrowed`)."""
        space, others = narrowed(self.space, pins)
        return Formulation(space, self.memory.on(space)), others

    def widened(self, pins: Pins) -> tuple[Formulation, Pins]:
        """Return the formulation of the space before it was narrowed, and all pins on that."""
        if self.space.kept is None:
            return self, pins
        memory = self.memory.widened()
        masks = {number: mask for number, mask in self.space.kept[1].items() if number not in self.space.limited}
        return Formulation(memory.space, memory), _widened(pins, masks)

    def name(self, number: int) -> str:
        """Return a node of the problem as errors call it: that of a decision; that of a segment's mode has no other."""
        return self._names[number]

    def problem(
        self,
        pins: Pins,
        row: MemoryRow | None = None,
        limit: int | None = None,
        modes: Mapping[str, str] | None = None,
    ) -> Problem:
        """Return the problem under pins; with a row and a limit, in bytes at each of its moments, within that.

        `modes` (segment → mode, some joined by "|", or "" for any) adds the nodes of segments; without it nothing is
        computed again.
        """
        return self.problems(pins, (row,), limit, modes)[0]

    def problems(
        self,
        pins: Pins,
        rows: Sequence[MemoryRow | None],
        limit: int | None = None,
        modes: Mapping[str, str] | None = None,
    ) -> tuple[Problem, ...]:
        """Return the same problem with each of these rows in turn: equal nodes and edges with equal seconds, other
        bytes.
        """
        held = {row: self._bytes_of(row) for row in rows}
        by_mode = tuple(
            [frozenset[int]().union(*each) for each in zip(*(h.by_mode for h in held.values()), strict=True)]
        )
        requested = pinned_by(pins), limit, None if modes is None else tuple(modes.items()), by_mode
        last = self._last.get(rows[0] is None)
        if last is None or last.requested != requested:
            last = self._last[rows[0] is None] = _Stated(requested, self._outline(pins, modes, by_mode))
        # Searches ask for the rows of before, and some more.
        last.problems = {
            row: last.problems.get(row)
            or self._with_bytes(last.outline, each.parts, None if row is None or limit is None else row.total * limit)
            for row, each in held.items()
        }
        return tuple([last.problems[row] for row in rows])

    def _outline(self, pins: Pins, modes: Mapping[str, str] | None, by_mode: _Numbers) -> _Outline:
        """Return a problem without the bytes that depend on the mode."""
        segments = {} if modes is None else {name: len(self.space.decisions) + i for i, name in enumerate(modes)}
        found = _Outline([], [])
        for number, decision in enumerate(self.space.decisions):
            check_whole()
            seconds = self._seconds(number, decision)
            if number in pins:
                seconds = self._pinned(seconds, pins[number])
            nothing = self.memory.tensors.nothing(seconds.shape)
            segment = segments.get(self.memory.lifetimes.segment[number])
            again = self.memory.backward_seconds(number) if segment is not None else None
            is_by_mode = segment is not None and (again is not None or number in by_mode[NODE])
            found.nodes.append((self._names[number], seconds, nothing if is_by_mode else None))
            if is_by_mode:
                assert segment is not None
                found.edges.append(((segment, number), self._stacked(again or (nothing,), float), (NODE, number, True)))
            if self.space.imbalance > 1 and number in self._with_rows:
                found.edges.extend(self._uneven_call(number, segment, again, number in by_mode[UNEVEN_NODE]))
        for name, mode in (modes or {}).items():
            taken = mode.split("|") if mode else self.memory.lifetimes.modes
            allowed = np.array([0.0 if each in taken else np.inf for each in self.memory.lifetimes.modes])
            found.nodes.append((f"recompute:{name}", allowed, self.memory.tensors.nothing(allowed.shape)))
        for number, tensor_edge in enumerate(self.space.edges):
            check_whole()  # a table of moves on four axes takes a second
            seconds, ends = self._reshard(tensor_edge), (tensor_edge.source, tensor_edge.target)
            segment = segments.get(self.memory.lifetimes.segment[tensor_edge.target])
            again = None if segment is None else self.memory.backward_seconds(tensor_edge)
            if segment is None or (again is None and number not in by_mode[EDGE]):
                found.edges.append((ends, seconds, (EDGE, number, False)))
            else:
                seconds = self._stacked(self._with_more(seconds, again), float)
                found.edges.append(((segment, *ends), seconds, (EDGE, number, True)))
            if self.space.imbalance > 1 and self.space.rows_on(tensor_edge) is not None:
                found.edges.extend(self._uneven_edge(number, tensor_edge, segment, number in by_mode[UNEVEN_EDGE]))
        return found

    def _with_bytes(self, outline: _Outline, parts: _Parts, budget: int | None) -> Problem:
        nodes, edges = [], []
        for number, (name, seconds, nothing) in enumerate(outline.nodes):
            check_whole()
            num_bytes = self._taken(parts, NODE, number, False) if nothing is None else nothing
            assert num_bytes is not None, "every decision has some"
            nodes.append(Node(name, seconds, num_bytes))
        for ends, seconds, taken in outline.edges:
            check_whole()
            edges.append(Edge(ends, seconds, None if taken is None else self._taken(parts, *taken)))
        return Problem(tuple(nodes), tuple(edges), budget)

    def _taken(self, parts: _Parts, part: int, number: int, is_by_mode: bool) -> np.ndarray | None:
        found = parts[part].get(number)
        if found is None:
            return None
        if not is_by_mode:
            return found[0]
        return self._stacked(tuple(map(self._least, found)) if part == UNEVEN_EDGE else found, int)

    def _bytes_of(self, row: MemoryRow | None) -> _RowBytes:
        if row not in self._row_bytes:
            memory, space = self.memory, self.space
            nothing = {
                n: (memory.tensors.nothing(each.candidates.seconds.shape),) for n, each in enumerate(space.decisions)
            }
            if row is None:
                self._row_bytes[row] = _RowBytes.of(nothing, {}, {}, {})
            else:

                def taken(place: Place, uneven: bool = False) -> Modes | None:
                    check_whole()
                    return bytes_in(memory, place, row, uneven)

                uneven = space.imbalance > 1
                self._row_bytes[row] = _RowBytes.of(
                    {number: taken(number) or nothing[number] for number in nothing},
                    {number: taken(tensor_edge) for number, tensor_edge in enumerate(space.edges)},
                    {number: taken(number, uneven) for number in self._with_rows if uneven},
                    {number: taken(edge, uneven) for number, edge in enumerate(space.edges) if uneven},
                )
        return self._row_bytes[row]

    def _uneven_call(self, number: int, segment: int | None, again: Modes | None, by_mode: bool) -> list[_Edge]:
        """Return the edges that price a call's expert rows beyond an equal share."""
        rows, seconds = self.space.rows[number], self.space.decisions[number].candidates.seconds
        ends, more = (rows.counts, number), self._uneven_bytes(rows, seconds)
        if segment is None or (again is None and not by_mode):
            return [(ends, more, (UNEVEN_NODE, number, False))]
        nothing = self.memory.tensors.nothing(seconds.shape)
        added = self._stacked(tuple(self._uneven_bytes(rows, each) for each in again or (nothing,)), float)
        return [(ends, more, None), ((segment, *ends), added, (UNEVEN_NODE, number, True))]

    def _uneven_edge(self, number: int, tensor_edge: TensorEdge, segment: int | None, by_mode: bool) -> list[_Edge]:
        """Return the edges that price the expert rows on a graph edge beyond an equal share.

        A problem's edge has at most three ends. If bytes also depend on the mode, only those count that are taken
        whatever the source chooses. That is too few only if rows whose features are split move within a segment.
        """
        rows = self.space.rows_on(tensor_edge)
        assert rows is not None, "an edge without expert rows"
        ends, more = (
            (rows.counts, tensor_edge.source, tensor_edge.target),
            self._uneven_bytes(rows, self._reshard(tensor_edge)),
        )
        if segment is None or not by_mode:
            return [(ends, more, (UNEVEN_EDGE, number, False))]
        num_strategies = (
            len(self.space.decisions[end].candidates.strategies) for end in (rows.counts, tensor_edge.target)
        )
        shape = (self._num_modes, *num_strategies)
        nothing = self._matrices.setdefault(("no seconds", shape), np.zeros(shape))
        return [(ends, more, None), ((segment, rows.counts, tensor_edge.target), nothing, (UNEVEN_EDGE, number, True))]

    def _least(self, held: np.ndarray) -> np.ndarray:
        """Return the bytes of an edge, by counts and target, that are taken whatever is chosen at its source."""
        return self.memory.cached(("least", id(held)), lambda: held.min(axis=1))

    def _uneven_bytes(self, rows: ExpertRows, seconds: np.ndarray) -> np.ndarray:
        """Return the seconds of rows above an equal share, by strategies of the counts' decision and of the share."""
        shares = uneven_share(self.memory.tensors, rows)
        key = ("beside", id(shares), id(seconds))
        if key not in self._matrices:
            finite = np.where(np.isfinite(seconds), seconds, 0.0)
            self._matrices[key] = np.multiply.outer(shares, finite)
            self._matrices[key, "held"] = seconds  # an id means something while its object lives
        return self._matrices[key]

    def _seconds(self, number: int, decision: Decision) -> np.ndarray:
        """Return the seconds of a decision for one micro-batch, its share of what is done once a step."""
        seconds, more = decision.candidates.seconds, self.memory.accumulation
        if not more.microbatches.several or not more.once(number):
            return seconds
        return self._matrices.setdefault(("once", id(decision.candidates)), seconds / more.microbatches.count)

    def _pinned(self, seconds: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """Return the seconds of what a pin allows; equal arrays under one mask stay one array."""
        key = ("pinned", id(seconds), id(allowed))
        if key not in self._matrices:
            self._matrices[key] = np.where(allowed, seconds, np.inf)
            self._stacks[key, "held"] = seconds, allowed  # type: ignore[assignment]  # an id means something while its object lives
        return self._matrices[key]

    def _reshard(self, tensor_edge: TensorEdge) -> np.ndarray:
        key = self.space.kind(tensor_edge)
        if key not in self._matrices:
            seconds = self.space.reshard_seconds(tensor_edge)
            self._matrices[key] = self.memory.accumulation.shared_seconds(tensor_edge, seconds)
        return self._matrices[key]

    @property
    def _num_modes(self) -> int:
        return len(self.memory.lifetimes.modes)

    def _with_more(self, seconds: np.ndarray, again: Modes | None) -> Modes:
        """Return the seconds of an edge by mode of its target's segment, recomputation and offloading included."""
        return (seconds,) if again is None else tuple(self._sum(seconds, each) for each in again)

    def _sum(self, seconds: np.ndarray, more: np.ndarray) -> np.ndarray:
        key = ("sum", id(seconds), id(more))
        if key not in self._matrices:
            self._matrices[key] = seconds + more
            self._stacks[key, "held"] = seconds, more  # type: ignore[assignment]  # an id means something while its object lives
        return self._matrices[key]

    def _stacked(self, arrays: Modes, kind: type) -> np.ndarray:
        """Stack arrays along a first dim of modes; equal arrays stay one object."""
        key = (tuple(map(id, arrays)), kind)
        if key not in self._stacks:
            every = arrays * self._num_modes if len(arrays) == 1 else arrays
            self._stacks[key] = np.stack(every).astype(np.float64 if kind is float else np.int64, copy=False)
            self._stacks[key, "held"] = arrays  # type: ignore[assignment]  # an id means something while its object lives
        return self._stacks[key]


def _name(decision: Decision, parameters: Mapping[str, str]) -> str:
    """Return the name of a parameter in the model, or of a call with the module it belongs to."""
    module = decision.node.meta.get("module") if decision.kind == "call" else None
    return parameters.get(decision.name) or (f"{decision.name} of {module}" if module else decision.name)


def pinned_by(pins: Pins) -> object:
    """Return a hashable key that identifies the pins."""
    return tuple([(number, mask.tobytes()) for number, mask in pins.items()])


def _widened(pins: Pins, masks: Pins) -> Pins:
    """Return pins of a space that keeps the strategies of masks, and these masks, as pins of the space before."""
    found = {**masks, **pins}
    for number in pins.keys() & masks.keys():
        found[number] = masks[number].copy()
        found[number][masks[number]] = pins[number]
    return found
