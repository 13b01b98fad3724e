"""The problem that a space states to the solver: menus, reshard costs, pins, and the bytes at some moments of a step.

Nodes are the decisions in their order and, where recomputation may be chosen, one node per segment behind them with
the modes as its strategies. Bytes and seconds that depend on the mode lie on edges between a segment and its calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.memory.model import MemoryModel, Modes
from autopar.memory.moments import MemoryRow, node_bytes, wire_bytes
from autopar.program.recompute_segments import MODES
from autopar.solver.problem import Edge, Node, Problem
from autopar.space.space import Decision, Space, Wire

Pins = Mapping[int, np.ndarray]
"""Decision → which of its strategies are allowed."""


class Formulation:
    """States problems about one space; whatever equal calls have in common is computed once."""

    def __init__(self, space: Space, memory: MemoryModel) -> None:
        self.space = space
        self.memory = memory
        self._matrices: dict[object, np.ndarray] = {}
        self._stacks: dict[object, np.ndarray] = {}
        parameters = space.program.parameter_names
        self._names = [_name(decision, parameters) for decision in space.decisions]
        """Of the decisions, as errors are to call them."""

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

        `modes` (segment → mode, "" for free) adds the nodes of segments; without it nothing is computed again.
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
        nodes: list[list[Node]] = [[] for _ in rows]
        edges: list[list[Edge]] = [[] for _ in rows]
        for number, decision in enumerate(self.space.decisions):
            seconds = self._seconds(number, decision)
            if number in pins:
                seconds = np.where(pins[number], seconds, np.inf)
            nothing, name = self.memory.nothing(seconds.shape), self._names[number]
            held = [(nothing,) if row is None else node_bytes(self.memory, number, row) for row in rows]
            segment = segments.get(self.memory.lifetimes.segment[number])
            again = self.memory.recompute_seconds(number) if segment is not None else None
            by_mode = segment is not None and (again is not None or any(len(each) > 1 for each in held))
            for place, each in enumerate(held):
                nodes[place].append(Node(name, seconds, nothing if by_mode else each[0]))
                if by_mode:
                    assert segment is not None
                    added = self._stacked(again or (nothing,), float)
                    edges[place].append(Edge((segment, number), added, self._stacked(each, int)))
        for name, mode in (modes or {}).items():
            allowed = np.array([0.0 if mode in ("", each) else np.inf for each in MODES])
            for each in nodes:
                each.append(Node(f"recompute:{name}", allowed, self.memory.nothing(allowed.shape)))
        for wire in self.space.wires:
            seconds = self._reshard(wire)
            taken = [None if row is None else wire_bytes(self.memory, wire, row) for row in rows]
            segment = segments.get(self.memory.lifetimes.segment[wire.target])
            by_mode = segment is not None and any(each is not None and len(each) > 1 for each in taken)
            for place, each in enumerate(taken):
                if not by_mode:
                    edges[place].append(Edge((wire.source, wire.target), seconds, None if each is None else each[0]))
                    continue
                assert segment is not None
                stacked = None if each is None else self._stacked(each, int)
                edges[place].append(
                    Edge((segment, wire.source, wire.target), self._stacked((seconds,), float), stacked)
                )
        return tuple(Problem(tuple(n), tuple(e), budget) for n, e in zip(nodes, edges, strict=True))

    def _seconds(self, number: int, decision: Decision) -> np.ndarray:
        """Seconds of a decision for one micro-batch, its share of what is done once a step."""
        seconds, more = decision.menu.seconds, self.memory.accumulation
        if not more.microbatches.several or not more.once(number):
            return seconds
        return self._matrices.setdefault(("once", id(decision.menu)), seconds / more.microbatches.count)

    def _reshard(self, wire: Wire) -> np.ndarray:
        key = self.space.kind(wire)
        if key not in self._matrices:
            seconds = self.space.reshard_seconds(wire)
            self._matrices[key] = self.memory.accumulation.shared_seconds(wire, seconds)
        return self._matrices[key]

    def _stacked(self, arrays: Modes, kind: type) -> np.ndarray:
        """One array with the modes as its first dim; equal arrays stay one object."""
        key = (tuple(map(id, arrays)), kind)
        if key not in self._stacks:
            every = arrays * len(MODES) if len(arrays) == 1 else arrays
            self._stacks[key] = np.stack(every).astype(np.float64 if kind is float else np.int64)
            self._stacks[key, "held"] = arrays  # type: ignore[assignment]  # an id means something while its object lives
        return self._stacks[key]


def _name(decision: Decision, parameters: Mapping[str, str]) -> str:
    """The name of a parameter in the model, or of a call with the module it belongs to."""
    module = decision.node.meta.get("module") if decision.kind == "call" else None
    return parameters.get(decision.name) or (f"{decision.name} of {module}" if module else decision.name)
