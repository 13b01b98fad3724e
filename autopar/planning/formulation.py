"""The problem that a space states to the solver: menus, reshard costs, pins, and the bytes at some moments of a step.

Nodes are the decisions in their order and, where recomputation may be chosen, one node per segment behind them with
the modes as its strategies. Bytes and seconds that depend on the mode lie on edges between a segment and its calls.
What rows of experts cost beside an equal share of them (`memory.uneven_rows`) lies on edges between the decision on
their counts and the calls and wires that they pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.memory.model import MemoryModel, Modes
from autopar.memory.moments import MemoryRow, node_bytes, uneven_node_bytes, uneven_wire_bytes, wire_bytes
from autopar.memory.uneven_rows import excess
from autopar.solver.problem import Edge, Node, Problem
from autopar.space.space import Decision, ExpertRows, Space, Wire

Pins = Mapping[int, np.ndarray]
"""Decision → which of its strategies are allowed."""
_Moments = Sequence[MemoryRow | None]


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes in a row: of each decision, and of each wire, mode by mode."""

    nodes: list[Modes]
    wires: list[Modes | None]


class Formulation:
    """States problems about one space; whatever equal calls have in common is computed once."""

    def __init__(self, space: Space, memory: MemoryModel) -> None:
        self.space = space
        self.memory = memory
        self._matrices: dict[object, np.ndarray] = {}
        self._stacks: dict[object, np.ndarray] = {}
        self._held: dict[MemoryRow | None, _Held] = {}
        parameters = space.program.parameter_names
        self._names = [_name(decision, parameters) for decision in space.decisions]
        """Of the decisions, as errors are to call them."""
        self.without_a_limit: dict[object, Any] = {}
        """What was found without a limit, by pins and modes."""

    def name(self, number: int) -> str:
        """A node of the problem as errors call it: that of a decision; that of a segment's mode has no other."""
        return self._names[number]

    def problem(
        self,
        pins: Pins,
        row: MemoryRow | None = None,
        budget: int | None = None,
        modes: Mapping[str, str] | None = None,
    ) -> Problem:
        """The problem under pins; with a row and its budget, which is for the whole row, under a memory limit.

        `modes` (segment → mode, some joined by "|", or "" for any) adds the nodes of segments; without it nothing is
        computed again.
        """
        return self.problems(pins, (row,), budget, modes)[0]

    def problems(
        self,
        pins: Pins,
        rows: Sequence[MemoryRow | None],
        budget: int | None = None,
        modes: Mapping[str, str] | None = None,
    ) -> tuple[Problem, ...]:
        """The same problem with each of these rows in turn: equal nodes and edges with equal seconds, other bytes."""
        segments = {} if modes is None else {name: len(self.space.decisions) + i for i, name in enumerate(modes)}
        of_rows = [self._bytes_of(row) for row in rows]
        nodes: list[list[Node]] = [[] for _ in rows]
        edges: list[list[Edge]] = [[] for _ in rows]
        for number, decision in enumerate(self.space.decisions):
            seconds = self._seconds(number, decision)
            if number in pins:
                seconds = self._pinned(seconds, pins[number])
            nothing, name = self.memory.nothing(seconds.shape), self._names[number]
            held = [each.nodes[number] for each in of_rows]
            segment = segments.get(self.memory.lifetimes.segment[number])
            again = self.memory.recompute_seconds(number) if segment is not None else None
            by_mode = segment is not None and (again is not None or any(len(each) > 1 for each in held))
            for place, each in enumerate(held):
                nodes[place].append(Node(name, seconds, nothing if by_mode else each[0]))
                if by_mode:
                    assert segment is not None
                    added = self._stacked(again or (nothing,), float)
                    edges[place].append(Edge((segment, number), added, self._stacked(each, int)))
            if self.space.imbalance > 1 and number in self.space.rows and decision.kind == "call":
                for found, more in zip(edges, self._uneven_call(number, rows, segment), strict=True):
                    found += more
        for name, mode in (modes or {}).items():
            taken = mode.split("|") if mode else self.memory.lifetimes.modes
            allowed = np.array([0.0 if each in taken else np.inf for each in self.memory.lifetimes.modes])
            for each in nodes:
                each.append(Node(f"recompute:{name}", allowed, self.memory.nothing(allowed.shape)))
        for number, wire in enumerate(self.space.wires):
            seconds = self._reshard(wire)
            taken = [each.wires[number] for each in of_rows]
            segment = segments.get(self.memory.lifetimes.segment[wire.target])
            copying = None if segment is None else self.memory.host_copies.seconds_on(wire)
            by_mode = copying is not None or (segment is not None and _by_mode(taken))
            for place, each in enumerate(taken):
                if not by_mode:
                    edges[place].append(Edge((wire.source, wire.target), seconds, None if each is None else each[0]))
                    continue
                assert segment is not None
                stacked = None if each is None else self._stacked(each, int)
                by_each = self._stacked(self._with_copies(seconds, copying), float)
                edges[place].append(Edge((segment, wire.source, wire.target), by_each, stacked))
            if self.space.imbalance > 1 and self.space.rows_on(wire) is not None:
                for found, more in zip(edges, self._uneven_wire(wire, rows, segment), strict=True):
                    found += more
        return tuple(Problem(tuple(n), tuple(e), budget) for n, e in zip(nodes, edges, strict=True))

    def _bytes_of(self, row: MemoryRow | None) -> _Held:
        """What decisions and wires hold in a row: searches ask for the rows of before, and one more."""
        if row not in self._held:
            memory, space = self.memory, self.space
            if row is None:
                nodes = [(memory.nothing(each.menu.seconds.shape),) for each in space.decisions]
                self._held[row] = _Held(nodes, [None] * len(space.wires))
            else:
                nodes = [node_bytes(memory, number, row) for number in range(len(space.decisions))]
                self._held[row] = _Held(nodes, [wire_bytes(memory, wire, row) for wire in space.wires])
        return self._held[row]

    def _uneven_call(self, number: int, moments: _Moments, segment: int | None) -> list[list[Edge]]:
        """What a call costs on account of rows beside a share of them, with the bytes of each of the moments."""
        rows, seconds = self.space.rows[number], self.space.decisions[number].menu.seconds
        held = [None if each is None else uneven_node_bytes(self.memory, number, each) for each in moments]
        again = self.memory.recompute_seconds(number) if segment is not None else None
        ends, more = (rows.counts, number), self._beside(rows, seconds)
        if segment is None or (again is None and not _by_mode(held)):
            return [[Edge(ends, more, None if each is None else each[0])] for each in held]
        nothing = self.memory.nothing(seconds.shape)
        added = self._stacked(tuple(self._beside(rows, each) for each in again or (nothing,)), float)
        stacked = (None if each is None else self._stacked(each, int) for each in held)
        return [[Edge(ends, more), Edge((segment, *ends), added, each)] for each in stacked]

    def _uneven_wire(self, wire: Wire, moments: _Moments, segment: int | None) -> list[list[Edge]]:
        """What a wire costs on account of rows beside a share of them, with the bytes of each of the moments.

        An edge has three ends at most. Where bytes depend on the mode, too, those are counted that are taken whatever
        is at the wire's start: too few only where rows whose features are split move within a segment.
        """
        rows = self.space.rows_on(wire)
        assert rows is not None, "a wire without rows of experts"
        held = [None if each is None else uneven_wire_bytes(self.memory, wire, each) for each in moments]
        ends, more = (rows.counts, wire.source, wire.target), self._beside(rows, self._reshard(wire))
        if segment is None or not _by_mode(held):
            return [[Edge(ends, more, None if each is None else each[0])] for each in held]
        found: list[list[Edge]] = []
        for each in held:
            least = None if each is None else self._stacked(tuple(map(self._least, each)), int)
            shape = (
                self._num_modes,
                *(len(self.space.decisions[end].menu.strategies) for end in (rows.counts, wire.target)),
            )
            nothing = self._matrices.setdefault(("no seconds", shape), np.zeros(shape))
            found.append([Edge(ends, more), Edge((segment, rows.counts, wire.target), nothing, least)])
        return found

    def _least(self, held: np.ndarray) -> np.ndarray:
        """The bytes of a wire, by counts and target, that are taken whatever is chosen at its start."""
        return self.memory.cached(("least", id(held)), lambda: held.min(axis=1))

    def _beside(self, rows: ExpertRows, seconds: np.ndarray) -> np.ndarray:
        """Seconds of rows beside a share, by the strategies of the decision on their counts and those of the share."""
        shares = excess(self.memory, rows)
        key = ("beside", id(shares), id(seconds))
        if key not in self._matrices:
            finite = np.where(np.isfinite(seconds), seconds, 0.0)
            self._matrices[key] = np.multiply.outer(shares, finite)
            self._matrices[key, "held"] = seconds  # an id means something while its object lives
        return self._matrices[key]

    def _seconds(self, number: int, decision: Decision) -> np.ndarray:
        """Seconds of a decision for one micro-batch, its share of what is done once a step."""
        seconds, more = decision.menu.seconds, self.memory.accumulation
        if not more.microbatches.several or not more.once(number):
            return seconds
        return self._matrices.setdefault(("once", id(decision.menu)), seconds / more.microbatches.count)

    def _pinned(self, seconds: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """Seconds of what a pin allows; equal arrays under one mask stay one array."""
        key = ("pinned", id(seconds), id(allowed))
        if key not in self._matrices:
            self._matrices[key] = np.where(allowed, seconds, np.inf)
            self._stacks[key, "held"] = seconds, allowed  # type: ignore[assignment]  # an id means something while its object lives
        return self._matrices[key]

    def _reshard(self, wire: Wire) -> np.ndarray:
        key = self.space.kind(wire)
        if key not in self._matrices:
            seconds = self.space.reshard_seconds(wire)
            self._matrices[key] = self.memory.accumulation.shared_seconds(wire, seconds)
        return self._matrices[key]

    @property
    def _num_modes(self) -> int:
        return len(self.memory.lifetimes.modes)

    def _with_copies(self, seconds: np.ndarray, copying: np.ndarray | None) -> Modes:
        """Seconds of a wire, by mode of its target's segment where some of what it brings leaves for the host."""
        if copying is None:
            return (seconds,)
        key = ("copying", id(seconds), id(copying))
        if key not in self._matrices:
            self._matrices[key] = seconds + copying
            self._stacks[key, "held"] = seconds, copying  # type: ignore[assignment]  # an id means something while its object lives
        return (*(seconds,) * (self._num_modes - 1), self._matrices[key])

    def _stacked(self, arrays: Modes, kind: type) -> np.ndarray:
        """One array with the modes as its first dim; equal arrays stay one object."""
        key = (tuple(map(id, arrays)), kind)
        if key not in self._stacks:
            every = arrays * self._num_modes if len(arrays) == 1 else arrays
            self._stacks[key] = np.stack(every).astype(np.float64 if kind is float else np.int64, copy=False)
            self._stacks[key, "held"] = arrays  # type: ignore[assignment]  # an id means something while its object lives
        return self._stacks[key]


def _name(decision: Decision, parameters: Mapping[str, str]) -> str:
    """The name of a parameter in the model, or of a call with the module it belongs to."""
    module = decision.node.meta.get("module") if decision.kind == "call" else None
    return parameters.get(decision.name) or (f"{decision.name} of {module}" if module else decision.name)


def _by_mode(held: Sequence[Modes | None]) -> bool:
    return any(each is not None and len(each) > 1 for each in held)
