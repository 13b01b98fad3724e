"""Side effects of calls (draws of random numbers, writes in place), and values that depend on weights alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.cached import WRITE_CACHE
from autopar.ir.program.program import Program

UNTAGGED = frozenset(
    {
        torch.ops.aten.feature_dropout.default,
        torch.ops.aten.feature_alpha_dropout.default,
        torch.ops.aten.scaled_dot_product_attention.default,
        ATTENTION_BY_MASK,
    }
)
"""Operations that draw random numbers, although PyTorch neither tags them nor gives them a generator."""
RATES = ("dropout", "dropout_p")
"""Names of the arguments in which PyTorch's operators take a probability to drop."""
MODES = ("train", "training")
"""Names of the arguments that say whether PyTorch's operators draw at all."""


def draws(target: object, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call with these arguments, by schema name, draws random numbers."""
    if not isinstance(target, torch._ops.OpOverload) or not _may_draw(target):
        return False
    rates = (*RATES, "p") if "dropout" in target._schema.name else RATES
    return all(arguments.get(name, True) is not False for name in MODES) and all(
        arguments.get(name) != 0 for name in rates
    )


@functools.cache
def _may_draw(target: torch._ops.OpOverload) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in target.tags or target in UNTAGGED
    return tagged or any("Generator" in str(argument.type) for argument in target._schema.arguments)


def is_random(node: fx.Node) -> bool:
    """Return whether a call draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload) or not _may_draw(node.target):
        return False
    given: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            given[argument.name] = node.args[position]
        else:
            given[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return draws(node.target, given)


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that a call changes in place; every other change is an output of the graph."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    given = [node.args[place] for place in _written(node.target) if place < len(node.args)]
    return [value for value in given if isinstance(value, fx.Node)]


@functools.cache
def _written(target: torch._ops.OpOverload) -> tuple[int, ...]:
    """Return the places of the arguments that a call changes."""
    arguments = target._schema.arguments
    return tuple(place for place, argument in enumerate(arguments) if argument.name.startswith("running_"))


def lies_in_input(node: fx.Node) -> bool:
    """Return whether a call's result shares the memory of its first input, as a cache that is written into does."""
    return node.target is WRITE_CACHE


def changed_buffers(program: Program) -> frozenset[str]:
    """Return the placeholders of buffers that the forward changes, in place or by an output of the graph."""
    changed = {program.buffers[name] for name in program.mutations if name in program.buffers}
    changed.update(buffer.name for node in program.graph.nodes for buffer in writes(node))
    return frozenset(changed)


def of_weights_alone(program: Program) -> frozenset[fx.Node]:
    """Return calls whose inputs are parameters, or computed from parameters alone, without random numbers."""
    names = set(program.parameters.values())
    weights = {node for node in program.graph.nodes if node.name in names}
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and weights.issuperset(inputs) and not is_random(node):
            weights.add(node)
            found.add(node)
    return frozenset(found)
