"""Gathers of weights of which each gathers all of its weights again in the backward, or none."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_arg

NUM_BEFORE = 3  # arguments of `gather_parameters` before the weights: axis, dims, sizes


def unmixed(graph: fx.Graph) -> fx.Graph:
    """Return the graph, in which a bucket that gathers some of its weights again has become two."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    parts: dict[tuple[fx.Node, int], tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        again: Any = node.kwargs.get("regather", ())
        once = [number for number in range(len(node.args) - NUM_BEFORE) if number not in again]
        if again and once:
            for numbers in (once, again):
                part = _gather_of(new, node, numbers, numbers is again, copies)
                parts.update({(node, number): (part, place) for place, number in enumerate(numbers)})
        elif node.target is operator.getitem and node.args in parts:
            copies[node] = new.create_node(node.op, operator.getitem, parts[node.args], name=node.name)
            copies[node].meta = dict(node.meta)
        elif node.op != "output":
            copies[node] = new.node_copy(node, copies.__getitem__)
    new.output(map_arg(graph.output_node().args[0], copies.__getitem__))
    new.lint()
    return new


def _gather_of(
    graph: fx.Graph, node: fx.Node, numbers: Sequence[int], again: bool, copies: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    target: Any = node.target
    args: Any = node.args
    axis, dims, sizes, *shards = args
    chosen = [(dims[number], sizes[number], copies[shards[number]]) for number in numbers]
    some_dims, some_sizes, some_shards = zip(*chosen, strict=True)
    kwargs: Any = {name: value for name, value in node.kwargs.items() if name != "regather"}
    if "to" in kwargs:
        kwargs["to"] = tuple(kwargs["to"][number] for number in numbers)
    if again:
        kwargs["regather"] = tuple(range(len(chosen)))
    new = graph.call_function(target, (axis, some_dims, some_sizes, *some_shards), kwargs)
    new.meta = dict(node.meta)
    return new
