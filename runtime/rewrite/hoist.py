"""A per-rank graph in two: what is done once per step, and what every micro-batch runs.

What gives the same in every micro-batch (`ir.program.effects.constant_calls`, such as tables of rotary embeddings) is
computed once, and so are the slices that a rank takes of it.
Weights, and views of them, are cast and moved (gathered, exchanged, made ready for a reduction of their gradients)
before the first micro-batch. The inputs of a micro-batch's graph are then leaves: their gradients add up over the
micro-batches as each rank computes them, and go backward through the moves once, reduced in buckets, at the end of the
step; or every micro-batch reduces them, and they add up in parts (`reduced_each`). Weights that are to be gathered
again in the backward are gathered in every micro-batch: they are stored in parts because the wholes would not fit. A
bucket that gathers some of its weights again becomes two.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.ir.program.calls import is_cast
from autopar.ir.program.effects import independent_of
from autopar.runtime.collectives import gradient_buckets, layout_moves
from autopar.runtime.recompute.marks import MARK
from autopar.runtime.recompute.unmixed import unmixed
from autopar.runtime.rewrite import reduced_each

aten = torch.ops.aten

MODULES = (gradient_buckets.__name__, layout_moves.__name__)
"""Names of the modules whose functions move tensors."""
VIEWS = (aten.slice.Tensor, aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default)
"""View operations through which weights may be used."""


@dataclass(frozen=True, slots=True)
class Hoisted:
    """The two graphs; `weights` takes parameters and constants, and gives the first inputs of `body`."""

    weights: fx.GraphModule
    body: fx.GraphModule
    parameters: tuple[str, ...]
    """Placeholders of `weights`, as the whole graph calls them."""
    others: tuple[str, ...]
    """Placeholders of `body` behind the weights, as the whole graph calls them."""


def hoist(
    graph: fx.Graph, parameters: Iterable[str], reduce_each: bool = False, constants: Collection[str] = ()
) -> Hoisted:
    """Split a per-rank graph; `parameters` are the placeholders that hold parameters, `constants` of what stays.

    With `reduce_each` every micro-batch reduces the gradients of weights that the step gathers (ZeRO-2).
    """
    graph = unmixed(graph)
    known = frozenset(parameters)
    if reduce_each:
        reduced_each.reduce_each(graph, _done_once(graph, known))
    once = _done_once(graph, known) | _constant(graph, constants)
    for node in reversed(graph.nodes):  # a view that does not move costs nothing
        if node.target in VIEWS and once.isdisjoint(node.users):
            once.discard(node)
    body_uses = {each for node in graph.nodes if node not in once for each in node.all_input_nodes}
    entering = [node for node in graph.nodes if node in once and node in body_uses]
    before = [node for node in graph.nodes if node in once]
    weights = _graph([node for node in before if node.op == "placeholder"], before, entering)
    others = [node for node in graph.nodes if node.op == "placeholder" and node not in once]
    body = _body([*entering, *others], graph, once)
    return Hoisted(
        weights,
        body,
        tuple(node.name for node in before if node.op == "placeholder"),
        tuple(node.name for node in others),
    )


def first_uses(hoisted: Hoisted) -> tuple[int, ...]:
    """Return the place in `body` of the first call that uses each weight."""
    nodes = list(hoisted.body.graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    weights = placeholders[: len(placeholders) - len(hoisted.others)]
    return tuple(min(map(place.__getitem__, weight.users)) for weight in weights)


def adds_parts(hoisted: Hoisted) -> tuple[bool, ...]:
    """Return whether each micro-batch reduces the gradient of each weight of `body`, so that reduced ones add up."""
    placeholders = [node for node in hoisted.body.graph.nodes if node.op == "placeholder"]
    weights = placeholders[: len(placeholders) - len(hoisted.others)]
    return tuple(any(getattr(user.target, "__module__", "") in MODULES for user in each.users) for each in weights)


def _done_once(graph: fx.Graph, parameters: frozenset[str]) -> set[fx.Node]:
    """Return parameters, their moves and casts, and views of them."""
    once = {node for node in graph.nodes if node.op == "placeholder" and node.name in parameters}
    for node in graph.nodes:
        takes = node.all_input_nodes
        if node.op == "call_function" and takes and once.issuperset(takes) and (_moves(node) or node.target in VIEWS):
            once.add(node)
    return once


def _constant(graph: fx.Graph, names: Collection[str]) -> set[fx.Node]:
    """Return calls of constants alone, and the placeholders that they take."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    calls = independent_of(graph, {node.name for node in given if node.name not in names})
    return {*calls, *(node for node in given if node.name in names and not calls.isdisjoint(node.users))}


def _moves(node: fx.Node) -> bool:
    """Return whether a call only casts weights, moves them once, or takes one of them out of a bucket."""
    if node.target is operator.getitem or node.target is aten.detach.default or is_cast(node):
        return True
    if node.target is gradient_buckets.use_gathered:
        return False
    return getattr(node.target, "__module__", "") in MODULES and not node.kwargs.get("regather")


def _graph(placeholders: list[fx.Node], nodes: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.node_copy(node) for node in placeholders}
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, "Weights")


def _body(placeholders: list[fx.Node], whole: fx.Graph, once: set[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        copies[node] = graph.placeholder(node.name)
        # An input is not computed again, whatever the call did that gave it.
        copies[node].meta = {key: value for key, value in node.meta.items() if key != MARK}
    for node in whole.nodes:
        if node not in once and node not in copies and node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(map_arg(whole.output_node().args[0], copies.__getitem__))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, "Body")
