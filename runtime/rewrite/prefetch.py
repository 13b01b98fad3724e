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

from torch import fx

from autopar.ir.program.calls import is_cast
from autopar.runtime.collectives.gathering import start_gather
from autopar.runtime.collectives.gradient_buckets import (
    cast_weight,
    cast_weights,
    gather_parameters,
    reduce_gradients,
    use_gathered,
)
from autopar.runtime.recompute.unmixed import NUM_BEFORE

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
