"""Side effects of calls (draws of random numbers, writes in place), values that depend on weights alone, and calls that
run while rows of experts travel.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.program.calls import is_call
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.cached import WRITE_CACHE
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
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
EXCHANGES = (DISPATCH, COMBINE)
"""Calls that send rows of experts from rank to rank, where a plan has them do so."""


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


def independent_of(graph: fx.Graph, names: Collection[str]) -> frozenset[fx.Node]:
    """Return the calls that no placeholder of these names is upstream of, and that draw nothing and write nothing."""
    bound = {node for node in graph.nodes if node.op == "placeholder" and node.name in names}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        draws = is_random(node) or "key" in node.kwargs
        if draws or writes(node) or not bound.isdisjoint(node.all_input_nodes):
            bound.add(node)
        else:
            found.add(node)
    return frozenset(found)


def constant_placeholders(program: Program) -> frozenset[str]:
    """Return the placeholders of constants, and of buffers that the forward does not change."""
    return frozenset((*program.constants, *program.buffers.values())) - changed_buffers(program)


def constant_calls(program: Program) -> frozenset[fx.Node]:
    """Return the calls that give the same in every micro-batch: those of constants and unchanged buffers alone."""
    if "constant calls" not in program.facts:
        given = {node.name for node in program.graph.nodes if node.op == "placeholder"}
        program.facts["constant calls"] = independent_of(program.graph, given - constant_placeholders(program))
    return program.facts["constant calls"]


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


def calls_meanwhile(program: Program) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
    """Map dispatches and combines to the calls that run while their rows travel.

    Exchanges are left out if no such call takes an activation and a weight: there is nothing to hide behind.
    """
    if "meanwhile" not in program.facts:
        program.facts["meanwhile"] = _calls_meanwhile(program)
    return program.facts["meanwhile"]


def weights_of(program: Program) -> frozenset[fx.Node]:
    """Return parameters, and calls whose inputs are weights alone."""
    return of_weights_alone(program).union(n for n in program.graph.nodes if n.name in program.parameter_names)


def weights_used(node: fx.Node, weights: Collection[fx.Node]) -> list[fx.Node]:
    """Return the weights that a call takes together with an activation; none if it takes weights alone."""
    found = [each for each in node.all_input_nodes if each in weights]
    return found if len(found) < len(node.all_input_nodes) else []


def _calls_meanwhile(program: Program) -> dict[fx.Node, tuple[fx.Node, ...]]:
    calls = [node for node in program.graph.nodes if is_call(node)]
    exchanges = [place for place, node in enumerate(calls) if node.target in EXCHANGES]
    if not exchanges:
        return {}
    weights = weights_of(program)
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for place in exchanges:
        users = {user for node in (calls[place], *calls[place].users) for user in node.users}
        first = next((number for number in range(place + 1, len(calls)) if calls[number] in users), place)
        between = tuple(node for node in calls[place + 1 : first] if node not in weights)
        if any(weights_used(node, weights) for node in between):
            found[calls[place]] = between
    return found
