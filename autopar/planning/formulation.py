"""The problem that a space states to the solver: menus, reshard costs, pins, and the bytes at some moments of a step.

Nodes are the decisions in their order and, where recomputation may be chosen, one node per segment behind them with
the modes as its strategies. Bytes and seconds that depend on the mode lie on edges between a segment and its calls.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        segments = {} if modes is None else {name: len(self.space.decisions) + i for i, name in enumerate(modes)}
        nodes: list[Node] = []
        edges: list[Edge] = []
        for number, decision in enumerate(self.space.decisions):
            seconds = self._seconds(number, decision)
            if number in pins:
                seconds = np.where(pins[number], seconds, np.inf)
            held = (self.memory.nothing(seconds.shape),) if row is None else node_bytes(self.memory, number, row)
            segment = segments.get(self.memory.lifetimes.segment[number])
            again = self.memory.recompute_seconds(number) if segment is not None else None
            if segment is None or (len(held) == 1 and again is None):
                nodes.append(Node(self._names[number], seconds, held[0]))
                continue
            nodes.append(Node(self._names[number], seconds, self.memory.nothing(seconds.shape)))
            added = self._stacked(again or (self.memory.nothing(seconds.shape),), float)
            edges.append(Edge((segment, number), added, self._stacked(held, int)))
        for name, mode in (modes or {}).items():
            allowed = np.array([0.0 if mode in ("", each) else np.inf for each in MODES])
            nodes.append(Node(f"recompute:{name}", allowed, self.memory.nothing(allowed.shape)))
        for wire in self.space.wires:
            seconds = self._reshard(wire)
            held = None if row is None else wire_bytes(self.memory, wire, row)
            segment = segments.get(self.memory.lifetimes.segment[wire.target])
            if held is None:
                edges.append(Edge((wire.source, wire.target), seconds))
            elif len(held) == 1 or segment is None:
                edges.append(Edge((wire.source, wire.target), seconds, held[0]))
            else:
                stacked = self._stacked((seconds,), float)
                edges.append(Edge((segment, wire.source, wire.target), stacked, self._stacked(held, int)))
        return Problem(tuple(nodes), tuple(edges), budget)

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
