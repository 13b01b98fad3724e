"""Segments, the units of recomputation, and what each mode of recomputation computes again and keeps.

A segment is a contiguous run of calls whose module path begins alike, up to its first number ("model.layers.3").

none        nothing is computed again; what autograd keeps is kept
selective   contractions (linear, matmul, convolution) are kept; norms, attention and elementwise calls computed again
full        everything is computed again from the segment's inputs

Results of collectives are kept in every mode: nothing communicates twice. Nor does a call run again that has made its
gradients in the forward. Chen et al. 2016 (full), Korthikanti et al. 2022 (selective).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from autopar.program.calls import module_of
from autopar.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from autopar.program.paths import layer_of
from autopar.program.program import Program, tensor_inputs
from autopar.program.saved_tensors import saved_in

MODES = ("none", "selective", "full")
GRADIENTS_IN_FORWARD = (LINEAR_CROSS_ENTROPY,)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of calls (with their getitems) in the order of the graph; names are unique in a program."""

    name: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The calls of a segment that run again in the backward, and those whose outputs are kept instead."""

    rerun: frozenset[fx.Node]
    kept: frozenset[fx.Node]


def segments_of(program: Program) -> tuple[Segment, ...]:
    """Every run of calls with a number in its module path and a gradient somewhere, in the order of the graph."""
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


def recomputation(program: Program, segment: Segment, mode: str, matmuls: Collection[fx.Node]) -> Recomputation:
    """What a mode runs again and keeps: only what the backward, or something that runs again, asks for.

    `matmuls` are the calls whose outputs the selective mode keeps.
    """
    if mode == "none":
        return Recomputation(frozenset(), frozenset())
    saved_by = saved_in(program)
    needed: set[fx.Node] = set()
    rerun: set[fx.Node] = set()
    kept: set[fx.Node] = set()
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
        if is_kept(node, mode, matmuls):
            kept.add(node)
        else:
            rerun.add(node)
            needed.update(inputs)
    return Recomputation(frozenset(rerun), frozenset(kept))


def is_kept(node: fx.Node, mode: str, matmuls: Collection[fx.Node]) -> bool:
    """Whether a call of a segment never runs again, whether it communicates or not."""
    return node.target in GRADIENTS_IN_FORWARD or (mode == "selective" and node in matmuls)


def _learns(node: fx.Node) -> bool:
    info = node.meta.get("tensor")
    infos = info if isinstance(info, tuple) else (info,)
    return any(each is not None and each.requires_grad for each in infos)
