"""Weights that a step gathers once, and whose gradients every micro-batch reduces (ZeRO-2).

    gathered = gather_parameters(shards)      becomes      gathered = gather_parameters(shards without a gradient)
                                                           used = use_gathered(shards, gathered)

`hoist` leaves the first line of this to the step, and gives the second to micro-batches, whose leaves are then the
shards: gradients add up in parts. Weights that are gathered over one axis after another stay as they are, and so do
their gradients, which add up whole.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from autopar.runtime.collectives.gradient_buckets import gather_parameters, use_gathered
from autopar.runtime.recompute.unmixed import NUM_BEFORE


def reduce_each(graph: fx.Graph, once: Collection[fx.Node]) -> None:
    """Let gathers among what is done `once` a step be used so, in the graph itself."""
    gathers = [node for node in graph.nodes if node in once and node.target is gather_parameters]
    behind = {gather: _gathers_before(gather) for gather in gathers}
    twice = {each for before in behind.values() for each in before}
    for gather in gathers:
        if not behind[gather] and gather not in twice:
            _use(graph, gather)


def _gathers_before(gather: fx.Node) -> set[fx.Node]:
    """Return the gathers through which the parts of a gather have come."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    nodes = list(gather.all_input_nodes)
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += node.all_input_nodes
            if node.target is gather_parameters:
                found.add(node)
    return found


def _use(graph: fx.Graph, gather: fx.Node) -> None:
    before, shards = gather.args[:NUM_BEFORE], gather.args[NUM_BEFORE:]
    users = list(gather.users)
    with graph.inserting_before(gather):
        apart = [graph.call_function(torch.ops.aten.detach.default, (shard,)) for shard in shards]
    gather.args = (*before, *apart)
    with graph.inserting_after(gather):
        reduce = {"reduce": gather.kwargs["reduce"]} if "reduce" in gather.kwargs else {}
        used = graph.call_function(use_gathered, (*before, *shards), reduce)
    with graph.inserting_before(used):
        wholes = [graph.call_function(operator.getitem, (gather, number)) for number in range(len(shards))]
    used.args = (*before, *shards, *wholes)
    for each in (*apart, used, *wholes):
        each.meta = dict(gather.meta)
    for user in users:
        user.replace_input_with(gather, used)
