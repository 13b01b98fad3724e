"""Runs a per-rank graph call by call: where segments are computed again in the backward, or somebody watches modules.

`saved_handles` says how segments are computed again. All other graphs run as the code that fx makes of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from autopar.runtime.recompute.marks import Mark, role_of
from autopar.runtime.recompute.module_ranges import ModuleRanges
from autopar.runtime.recompute.saved_handles import Claims, Frame, call


@dataclass(frozen=True, slots=True)
class RunCall:
    """A call of a per-rank graph as it is run."""

    node: fx.Node
    role: Mark | None
    last_uses: tuple[fx.Node, ...]
    """Values that no later call takes."""
    ends_segment: bool


def steps_of(graph: fx.Graph) -> tuple[RunCall, ...]:
    """The calls of a graph in order."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    last_of = {role.segment: node for node in calls if (role := role_of(node)) is not None and not role.weight}
    ends = set(last_of.values())
    last_uses: dict[fx.Node, list[fx.Node]] = {node: [] for node in calls}
    seen = set(graph.output_node().all_input_nodes)
    for node in reversed(calls):
        for each in (node, *node.all_input_nodes):
            if each not in seen:
                seen.add(each)
                last_uses[node].append(each)
    return tuple(RunCall(node, role_of(node), tuple(last_uses[node]), node in ends) for node in calls)


def run(graph: fx.Graph, steps: Sequence[RunCall], *inputs: Any) -> Any:
    """Run a graph on the values of its placeholders; `steps` are `steps_of(graph)`."""
    values: dict[fx.Node, Any] = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
    ranges = ModuleRanges.where_watched()
    claims, frame = Claims(), None
    with claims, contextlib.ExitStack() as stack:
        if ranges is not None:
            stack.callback(ranges.close)
        for step in steps:
            if ranges is not None:
                ranges.enter(step.node)
            if step.role is None:
                values[step.node] = call(step.node, values.__getitem__)
            elif step.role.weight:
                values[step.node] = claims.run_alone(step.node, step.role, values)
            else:
                frame = frame or Frame()
                values[step.node] = claims.run(frame, step.node, step.role, values)
            if ranges is not None:
                ranges.leave(step.node, values[step.node])
            if step.ends_segment and frame is not None:
                frame.close(claims.hold)
                frame = None
            for node in step.last_uses:
                del values[node]
    return map_arg(graph.output_node().args[0], values.__getitem__)
