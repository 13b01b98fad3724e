"""Gathers of weights issued ahead of their layer, so that they overlap with the matmuls of the layers before it.

Layers are numbered in the order of their first use. A gather of layer n becomes two calls: `start_gather` before the
first call of layer n - depth that computes (behind the gathers of that layer), and at its place `gather_parameters`,
which has a gradient, waits, and copies the weights out. The backward does the same in its order (`Regather`); it knows
layers by the number that `gather_parameters` is given.

For weights that are gathered over one axis after another, the first gather is issued ahead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.ir.program.calls import is_cast
from autopar.runtime.collectives.gathering import start_gather
from autopar.runtime.collectives.gradient_buckets import (
    cast_weight,
    cast_weights,
    gather_parameters,
    reduce_gradients,
    use_gathered,
)
from autopar.runtime.collectives.regather import empty_weights
from autopar.runtime.recompute.marks import role_of
from autopar.runtime.recompute.unmixed import NUM_BEFORE
from autopar.runtime.rewrite.hoist import VIEWS

COMPUTING = frozenset(("linear", "matmul", "layer_norm", "rms_norm", "group_norm", "conv1d", "conv2d", "conv3d"))
"""Operations that PyTorch makes of others, and whose result is never what they take."""
LAYER = "layer"
"""The key in a call's meta of the number of the layer whose weights it works on, or moves; absent where it has none."""
_MOVES: tuple[Callable[..., Any], ...] = (cast_weights, gather_parameters, reduce_gradients, start_gather, use_gathered)


def fetched_ahead(module: fx.GraphModule, depth: int) -> fx.GraphModule:
    """Return a per-rank graph with its gathers issued `depth` layers ahead; the graph itself for a depth of 0."""
    if depth == 0:
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    gathers = [node for node in graph.nodes if node.target is gather_parameters and _from_storage(node)]
    anchors = _anchors(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in gathers:
        layer = node.meta[LAYER]
        if node.kwargs.get("regather"):
            node.kwargs = {**node.kwargs, LAYER: layer}
        before = (anchors[n] for n in range(max(0, layer - depth), layer) if n in anchors)
        anchor = next((each for each in before if place[each] < place[node]), None)
        if anchor is not None and _is_first(node):
            _issue(graph, node, anchor, place)
    graph.lint()
    return fx.GraphModule(module, graph, type(module).__name__)


def _from_storage(gather: fx.Node) -> bool:
    """Return whether a layer's gather takes only parameters: as stored, cast, or gathered before."""
    return LAYER in gather.meta and all(_root(part).op == "placeholder" for part in _parts(gather))


def _is_first(gather: fx.Node) -> bool:
    """Return whether a gather takes only parameters as stored, or casts of them, which may be made at any time."""
    return all(_uncast(_value(part)).op == "placeholder" for part in _parts(gather))


def _parts(gather: fx.Node) -> tuple[fx.Node, ...]:
    return gather.args[NUM_BEFORE:]  # type: ignore[return-value]


def _root(part: fx.Node) -> fx.Node:
    """Return the node from which casts and moves of buckets have made a part."""
    while True:
        before, part = part, _uncast(_taken(part, gather_parameters, NUM_BEFORE))
        part = _value(part)
        if part is before:
            return part


def _value(part: fx.Node) -> fx.Node:
    """Return a tensor of the same values that is there before the reduction of its gradient is prepared."""
    while (before := _taken(part, reduce_gradients, 1)) is not part:
        part = before
    return part


def _taken(part: fx.Node, move: Callable[..., Any], num_before: int) -> fx.Node:
    """Return the input of a bucket's move that gives a part, after `num_before` other arguments; else the part
    itself.
    """
    source: Any = part.args[0] if part.target is operator.getitem else None
    if source is None or source.target is not move:
        return part
    number: Any = part.args[1]
    return source.args[num_before + number]


def _uncast(part: fx.Node) -> fx.Node:
    while _casts(part):
        part = part.args[0]  # type: ignore[assignment]
    return part


def _casts(node: fx.Node) -> bool:
    return node.target is cast_weight or is_cast(node)


def _anchors(graph: fx.Graph) -> dict[int, fx.Node]:
    """Map each layer to its first computing call after its first gather, if it has one."""
    waiting = {node.meta.get(LAYER) for node in graph.nodes if node.target is gather_parameters}
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or LAYER not in node.meta:
            continue
        if node.target is gather_parameters:
            waiting.discard(node.meta[LAYER])
        elif node.meta[LAYER] not in waiting and not moves_weights(node):
            found.setdefault(node.meta[LAYER], node)
    return found


def moves_weights(node: fx.Node) -> bool:
    """Return whether a call only brings weights to where they are used."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and (
        source.target in _MOVES or (_casts(node) and _root(node).op != "call_function")
    )


def _issue(graph: fx.Graph, gather: fx.Node, anchor: fx.Node, place: dict[fx.Node, int]) -> None:
    parts = [_value(part) for part in _parts(gather)]
    for each in (each for part in parts for each in _casts_of(part)):
        if place[each] > place[anchor]:
            anchor.prepend(each)
            place[each] = place[anchor]
    to = {"to": gather.kwargs["to"]} if "to" in gather.kwargs else {}
    with graph.inserting_before(anchor):
        issued = graph.call_function(start_gather, (*gather.args[:NUM_BEFORE], *parts), to)
    issued.meta = {"module": anchor.meta.get("module", ""), LAYER: gather.meta[LAYER], "layout": None}
    gather.kwargs = {**gather.kwargs, "in_flight": issued}


def _casts_of(part: fx.Node) -> Iterator[fx.Node]:
    """Yield the casts that make a part, in order."""
    if _casts(part):
        source: Any = part.args[0]
        yield from _casts_of(source)
        yield part


def emptied_after_use(module: fx.GraphModule) -> fx.GraphModule:
    """Return a per-rank graph that frees weights after their last use, if the backward gathers their bucket again.

    Their gathers may then fill the tensors that others of other steps have made.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    place = {node: number for number, node in enumerate(graph.nodes)}
    last: dict[fx.Node, list[fx.Node]] = {}
    runs_again = any(role_of(node) is not None for node in graph.nodes)
    for number, gather in enumerate(node for node in place if node.kwargs.get("regather")):
        reused = []
        for weight in gather.users:
            # A segment that is computed again begins with what the plan saves.
            saved = runs_again and weight.args[1] not in gather.kwargs["regather"]  # type: ignore[operator]
            use = None if saved or weight.target is not operator.getitem else _last_use(weight, place)
            if use is not None:
                last.setdefault(use, []).append(weight)
                reused.append(weight.args[1])
        if reused:
            gather.kwargs = {**gather.kwargs, "reuse": (number, tuple(reused))}
    for use, weights in last.items():
        with graph.inserting_after(use):
            graph.call_function(empty_weights, tuple(weights)).meta = {
                "module": use.meta.get("module", ""),
                "layout": None,
            }
    graph.lint()
    return fx.GraphModule(module, graph, type(module).__name__) if last else module


def _last_use(weight: fx.Node, place: dict[fx.Node, int]) -> fx.Node | None:
    """Return the last call that takes a weight or a view of it; None if something may be the weight later on."""
    last, waiting = weight, [weight]
    while waiting:
        for user in waiting.pop().users:
            if _views(user):
                waiting.append(user)
            elif not _computes(user):
                return None
            last = max(last, user, key=place.__getitem__)
    return last


def _views(node: fx.Node) -> bool:
    if node.target is operator.getitem or node.target in VIEWS:
        return True
    results = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return any(each.alias_info is not None and not each.alias_info.is_write for each in results)


def _computes(node: fx.Node) -> bool:
    """Return whether a call gives tensors of its own: never what it takes, as a dropout in evaluation does."""
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "").startswith("autopar.runtime.implementations.")
    if any(each.alias_info is not None for each in target._schema.returns) or target.namespace != "aten":
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return not composite or target._opname in COMPUTING
