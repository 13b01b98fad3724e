"""What calls do beside returning a result (draw random numbers, write in place), and what depends on weights alone."""

from __future__ import annotations

import torch
from torch import fx

from autopar.program.program import Program


def is_random(node: fx.Node) -> bool:
    """Whether a call may draw random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def writes(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a call changes in place; every other change is an output of the graph."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    named = zip(node.target._schema.arguments, node.args, strict=False)
    return [value for argument, value in named if argument.name.startswith("running_") and isinstance(value, fx.Node)]


def changed_buffers(program: Program) -> frozenset[str]:
    """Placeholders of the buffers that the forward changes, in place or by an output of the graph."""
    changed = {program.buffers[name] for name in program.mutations if name in program.buffers}
    changed.update(buffer.name for node in program.graph.nodes for buffer in writes(node))
    return frozenset(changed)


def of_weights_alone(program: Program) -> frozenset[fx.Node]:
    """Calls whose inputs are parameters, or computed from parameters alone, without random numbers."""
    names = set(program.parameters.values())
    weights = {node for node in program.graph.nodes if node.name in names}
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and weights.issuperset(inputs) and not is_random(node):
            weights.add(node)
            found.add(node)
    return frozenset(found)
