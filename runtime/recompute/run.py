"""Runs a per-rank graph call by call: where segments are computed again or offloaded, or somebody watches modules.

`saved_handles` says how segments are computed again, `on_host` how they are offloaded. All other graphs run as the code
that fx makes of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.runtime.recompute.marks import SEGMENT, role_of
from autopar.runtime.recompute.module_ranges import ModuleRanges
from autopar.runtime.recompute.on_host import OnHost
from autopar.runtime.recompute.prepared_calls import RunCall
from autopar.runtime.recompute.saved_handles import Claims, Frame


@dataclass(frozen=True, slots=True)
class Steps:
    """A graph as it runs call by call."""

    placeholders: tuple[fx.Node, ...]
    calls: tuple[RunCall, ...]
    """All calls in order."""
    returned: Any
    """Result of the graph, with nodes for values."""
    offloads: bool
    """True if saved tensors of some calls are offloaded to the host."""
    recomputes: bool
    """True if some calls are computed again."""


def steps_of(graph: fx.Graph) -> Steps:
    """Prepare a graph to run call by call."""
    calls = _calls_of(graph)
    placeholders = tuple(node for node in graph.nodes if node.op == "placeholder")
    offloads, recomputes = any(each.is_offloaded for each in calls), any(each.role is not None for each in calls)
    return Steps(placeholders, calls, graph.output_node().args[0], offloads, recomputes)


def _calls_of(graph: fx.Graph) -> tuple[RunCall, ...]:
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
    stretches = _stretches(calls)
    return tuple(
        RunCall.of(node, tuple(last_uses[node]), node in ends, stretch)
        for node, stretch in zip(calls, stretches, strict=True)
    )


def _stretches(calls: Sequence[fx.Node]) -> list[int]:
    """Return the number of each call's stretch; moves of tensors and weights belong to the stretch before them."""
    found, current, number = [], None, 0
    for node in calls:
        role = role_of(node)
        segment = node.meta.get(SEGMENT) if role is None or role.weight else role.segment
        if segment is not None and segment != current:
            current, number = segment, number + 1
        found.append(number)
    return found


def run(steps: Steps, *inputs: Any) -> Any:
    """Run a graph on the values of its placeholders."""
    values: dict[fx.Node, Any] = dict(zip(steps.placeholders, inputs, strict=True))
    ranges = ModuleRanges.where_watched()
    claims, frame, on_host = Claims(), None, None
    with claims, contextlib.ExitStack() as stack:
        if ranges is not None:
            stack.callback(ranges.close)
        if steps.offloads and torch.is_grad_enabled():
            on_host = OnHost(claims.hold)
            stack.callback(on_host.close)
            claims.hold_saved = on_host.hold
        for step in steps.calls:
            if ranges is not None:
                ranges.enter(step.node)
            if on_host is not None:
                on_host.enter(step.node, step.stretch, step.is_offloaded, values)
            if step.role is None or step.is_offloaded:
                values[step.node] = step.run(*map(values.__getitem__, step.inputs))
            elif step.role.weight:
                values[step.node] = claims.run_alone(step, step.role, values)
            else:
                frame = frame or Frame()
                values[step.node] = claims.run(frame, step, step.role, values)
            if on_host is not None:
                on_host.leave(values[step.node])
            if ranges is not None:
                ranges.leave(step.node, values[step.node])
            if step.ends_segment and frame is not None:
                frame.close(claims.hold)
                frame = None
            for node in step.last_uses:
                del values[node]
    return map_arg(steps.returned, values.__getitem__)
