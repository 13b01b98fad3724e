"""Segments, the units of recomputation and offload, and what each mode computes again, saves and offloads.

A segment is a contiguous run of calls whose module path begins alike, up to its first number ("model.layers.3").

none                    nothing is recomputed; what autograd saves stays
selective               products (linear, matmul, convolution, attention) and results of collectives are saved, but for
                        gathers, which run again; norms, activations, casts and other elementwise calls are recomputed
full_save_collectives   everything is recomputed from the segment's inputs and the results of its collectives
full                    everything is recomputed from the segment's inputs alone; its collectives run again
offload                 nothing is recomputed; what autograd saves goes to the host, and comes back for the backward

Only what a segment alone uses leaves, and no weights: what others use, too, would have to stay for them. A call that
has made its gradients in the forward never runs again. In the modes selective and full a tensor is saved before a
gather that enlarges it: with sequence parallelism a part of the positions.

Chen et al. 2016 (full), Korthikanti et al. 2022 (full with tensor parallelism; selective, which here saves attention,
as FlashAttention saves no scores), Rhu et al. 2016 (offload).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import fx

from autopar.ir.program.calls import is_call, module_of, source_of
from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from autopar.ir.program.paths import layer_of
from autopar.ir.program.program import Program, tensor_inputs
from autopar.ir.program.saved_tensors import saved_in

OFFLOAD = "offload"
SELECTIVE, FULL = "selective", "full"
RECOMPUTATIONS = ("none", SELECTIVE, "full_save_collectives", FULL)
GATHERING_AGAIN = (SELECTIVE, FULL)
"""Modes in which gathers of activations run again."""
MODES = (*RECOMPUTATIONS, OFFLOAD)
"""The modes of a segment; where nothing may leave for the host, the last of them is not offered."""
GRADIENTS_IN_FORWARD = (LINEAR_CROSS_ENTROPY,)


Bytes = TypeVar("Bytes", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of calls (with their getitems) in the order of the graph; names are unique in a program."""

    name: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The calls of a segment that run again in the backward, and those whose outputs are saved instead."""

    rerun: frozenset[fx.Node]
    saved: frozenset[fx.Node]


def segments_of(program: Program) -> tuple[Segment, ...]:
    """Return every run of calls with a number in its module path and any gradient, in the order of the graph."""
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        prefix = layer_of(module_of(node))
        if runs and runs[-1][0] == prefix:
            runs[-1][1].append(node)
        else:
            runs.append((prefix, [node]))
    found: list[Segment] = []
    seen: dict[str, int] = {}
    for prefix, nodes in runs:
        if prefix and any(map(_learns, nodes)):
            seen[prefix] = seen.get(prefix, 0) + 1
            name = prefix if seen[prefix] == 1 else f"{prefix}#{seen[prefix]}"
            found.append(Segment(name, tuple(nodes)))
    return tuple(found)


def recomputation(program: Program, segment: Segment, mode: str, products: Collection[fx.Node]) -> Recomputation:
    """Return what a mode runs again and saves: only what the backward, or something that runs again, asks for.

    `products` are the calls whose outputs the selective mode saves.
    """
    if mode in ("none", OFFLOAD):
        return Recomputation(frozenset(), frozenset())
    saved_by = saved_in(program)
    needed: set[fx.Node] = set()
    rerun: set[fx.Node] = set()
    saved_nodes: set[fx.Node] = set()
    for node in reversed(segment.nodes):
        if node.target is operator.getitem:
            if node in needed:
                rerun.add(node)
                needed.update(node.all_input_nodes)
            continue
        saved, inputs = saved_by[node], tensor_inputs(node)
        needed.update(inputs[i] for i in saved.inputs)
        if node not in needed and not saved.outputs and not saved.other_bytes:
            continue
        if is_saved(node, mode, products):
            saved_nodes.add(node)
        else:
            rerun.add(node)
            needed.update(inputs)
    return Recomputation(frozenset(rerun), frozenset(saved_nodes))


def is_saved(node: fx.Node, mode: str, products: Collection[fx.Node], communicates: bool = False) -> bool:
    """Return whether a call of a segment never runs again; `communicates`: whether it runs collectives itself."""
    saved = (mode == SELECTIVE and node in products) or (communicates and mode != FULL)
    return saved or node.target in GRADIENTS_IN_FORWARD


def moves_again(mode: str, inside: bool, before: Bytes, after: Bytes) -> bool | Bytes:
    """Return whether the collectives that move a tensor to a call of a segment run again.

    Args:
        mode: The mode of the segment.
        inside: Whether the tensor is made in the same segment.
        before: Bytes on a device before the collectives, or an array of them.
        after: Bytes behind them.
    """
    return mode in GATHERING_AGAIN and ((mode == FULL and inside) | (before < after))


def offloadable(program: Program) -> frozenset[fx.Node]:
    """Return the calls whose results may leave for the host with what a segment saves: nothing but that segment uses
    them.

    A view is used by who uses what it is a view of; views of parameters, buffers and inputs never leave.
    """
    if "offloadable" not in program.facts:
        program.facts["offloadable"] = _offloadable(program)
    return program.facts["offloadable"]


def _offloadable(program: Program) -> frozenset[fx.Node]:
    saved = saved_in(program)
    segment = {node: each.name for each in segments_of(program) for node in each.nodes}
    memory: dict[fx.Node, fx.Node] = {}
    """Call → the call or placeholder that has made the memory of its results."""
    users: dict[fx.Node, set[str]] = defaultdict(set)
    for node in program.graph.nodes:
        if not is_call(node):
            continue
        sources = (source_of(each)[0] for each in tensor_inputs(node))
        entering = [memory.get(source, source) for source in sources]
        memory[node] = entering[0] if saved[node].aliases else node
        for each in entering:
            users[each].add(segment.get(node, ""))
        if saved[node].outputs:
            users[memory[node]].add(segment.get(node, ""))
    for value in program.output:
        if isinstance(value, fx.Node):
            source, _ = source_of(value)
            users[memory.get(source, source)].add("")
    alone = {node for node, names in users.items() if len(names) == 1 and "" not in names and node.op != "placeholder"}
    return frozenset(node for node, maker in memory.items() if maker in alone)


def _learns(node: fx.Node) -> bool:
    info = node.meta.get("tensor")
    infos = info if isinstance(info, tuple) else (info,)
    return any(each is not None and each.requires_grad for each in infos)
