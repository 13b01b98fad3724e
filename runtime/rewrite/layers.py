"""A per-rank graph whose layers are calls, so that torch.compile makes kernels of a layer, and of equal layers once.

Calls in a row of one layer (`layer_of` their module; "" for what lies outside of layers) become one call of a function
of what they take. Moves of weights stay between these calls, before the layer that they would interrupt: weights are
gathered ahead, gathered again and reduced in buckets as without torch.compile.

    gather(0)  gather(1)  layer_0(x, w0)  gather(2)  layer_1(x, w1)  …

Layers are equal when they call the same with the same; draws are numbered from the first of their layer on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx
from torch.fx.node import map_arg

from autopar.ir.program.paths import layer_of
from autopar.runtime.implementations.randomness import keys_from
from autopar.runtime.recompute.marks import MARK, OF_OUTPUTS, OFFLOADABLE, SEGMENT, is_offloaded, role_of
from autopar.runtime.rewrite.prefetch import moves_weights

KEY = "key"
"""The keyword that numbers a call that draws."""
Make = Callable[[fx.Graph], Callable[..., Any]]
"""Function that turns the graph of a layer, whose output is a tuple, into a callable."""


def in_layers(graph: fx.Graph, make: Make) -> fx.Graph:
    """Return the graph with a call for each layer; `make` is called once for layers that are equal."""
    return _Layers(graph, make).run()


@dataclass(frozen=True, slots=True)
class _Call:
    """Runs a layer, whose draws are numbered from `first_key` on."""

    function: Callable[..., Any]
    first_key: int

    def __call__(self, *inputs: Any) -> Any:
        with keys_from(self.first_key):
            return self.function(*inputs)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a value of a layer where layers are compared."""

    number: int


class _Layers:
    """A graph that is written again, layer by layer."""

    def __init__(self, graph: fx.Graph, make: Make) -> None:
        self.old, self.new, self.make = graph, fx.Graph(), make
        self.copies: dict[fx.Node, fx.Node] = {}
        self.open: list[fx.Node] = []
        """The calls of the layer so far."""
        self.known: dict[object, Callable[..., Any]] = {}
        """Description of a layer's calls → the callable that runs the layer."""

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            joins = node.op == "call_function" and not _is_outside(node)
            if self.open and (_layer(node) != _layer(self.open[-1]) or (not joins and self._takes_open(node))):
                self._close()
            if joins:
                self.open.append(node)
            elif node.op == "output":
                self.new.output(map_arg(node.args[0], self.copies.__getitem__))
            else:
                self.copies[node] = self.new.node_copy(node, self.copies.__getitem__)
        return self.new

    def _takes_open(self, node: fx.Node) -> bool:
        """Return whether a node outside of layers takes a value that the open layer makes."""
        return not set(self.open).isdisjoint(node.all_input_nodes)

    def _close(self) -> None:
        """Write the open layer down as a call."""
        nodes, self.open = self.open, []
        inside = set(nodes)
        inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
        outputs = [node for node in nodes if not inside.issuperset(node.users)]
        first_key = min((node.kwargs[KEY] for node in nodes if KEY in node.kwargs), default=None)  # type: ignore[type-var]
        layer = _graph(inputs, nodes, outputs, first_key)
        same = _what_is_called(layer)
        if same not in self.known:
            self.known[same] = self.make(layer)
        function = self.known[same] if first_key is None else _Call(self.known[same], first_key)  # type: ignore[arg-type]
        given = tuple(map(self.copies.__getitem__, inputs))
        result = self.new.create_node("call_function", function, given, name=f"layer_{nodes[0].name}")
        result.meta["module"] = _layer(nodes[0])
        result.meta[SEGMENT] = next((node.meta[SEGMENT] for node in nodes if SEGMENT in node.meta), "")
        sending = next(filter(is_offloaded, nodes), None)
        if sending is not None:
            result.meta[MARK] = sending.meta[MARK]
            result.meta[OF_OUTPUTS] = tuple(bool(node.meta.get(OFFLOADABLE)) for node in outputs)
        for position, node in enumerate(outputs):
            self.copies[node] = self.new.call_function(operator.getitem, (result, position))
            self.copies[node].meta["module"] = _layer(node)


def _is_outside(node: fx.Node) -> bool:
    """Return whether a call only brings weights to their use, and is not recomputed together with its segment."""
    role = role_of(node)
    return moves_weights(node) and (role is None or role.weight)


def _layer(node: fx.Node) -> str:
    return layer_of(node.meta.get("module", ""))


def _graph(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], first_key: Any) -> fx.Graph:
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        if KEY in node.kwargs:
            values[node].update_kwarg(KEY, node.kwargs[KEY] - first_key)
    graph.output(tuple(values[node] for node in outputs))
    graph.lint()
    return graph


def _what_is_called(graph: fx.Graph) -> object:
    """Return a key that is equal for graphs with the same calls, arguments and recomputed calls."""
    places = {node: _Place(number) for number, node in enumerate(graph.nodes)}
    segments: dict[str, int] = {}
    found: list[object] = []
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), cast(Any, places.__getitem__))
        role = role_of(node)
        again = role and (segments.setdefault(role.segment, len(segments)), role.mode, role.saved)
        target = node.target if node.op == "call_function" else node.op
        found.append((target, repr(args), repr(kwargs), again))
    return tuple(found)
