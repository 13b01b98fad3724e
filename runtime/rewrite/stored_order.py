"""Weights whose parts are stored with the gathered dim outermost in memory.

A matrix that tensor parallelism splits along its rows is split along its columns over the axes of the batch. The parts
that a gather receives are then the whole, transposed, if each is stored transposed: one kernel unpacks all weights of a
message, and packs their gradients, which a product with a transposed weight makes transposed, too. Only products
take such a weight as fast as another one: a lookup would read its rows in parts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from autopar.runtime.collectives.gathering import start_gather
from autopar.runtime.collectives.gradient_buckets import cast_weight, gather_parameters

aten = torch.ops.aten


def columns_first(graph: fx.Graph, parameters: Iterable[str]) -> frozenset[str]:
    """Return the placeholders of matrices that are gathered along dim 1, for products alone."""
    known = frozenset(parameters)
    nodes = (node for node in graph.nodes if node.op == "placeholder" and node.name in known)
    return frozenset(node.name for node in nodes if node.users and all(_fits(node, user) for user in node.users))


def _fits(weight: fx.Node, user: fx.Node) -> bool:
    """Return whether a use gathers the weight along dim 1 and multiplies by the whole."""
    if user.target is cast_weight:
        return bool(user.users) and all(_fits(user, each) for each in user.users)
    if user.target not in (gather_parameters, start_gather):
        return False
    _, dims, _, *shards = user.args
    positions = [position for position, shard in enumerate(shards) if shard is weight]
    if any(dims[position] != 1 for position in positions):  # type: ignore[index]
        return False
    return user.target is start_gather or all(_is_multiplied(user, position) for position in positions)


def _is_multiplied(gather: fx.Node, position: int) -> bool:
    taken = [each for each in gather.users if each.target is operator.getitem and each.args[1] == position]
    uses = [(each, user) for each in taken for user in each.users]
    return bool(uses) and all(
        user.target is aten.linear.default and user.args[1] is each and each not in (user.args[0], *user.args[2:])
        for each, user in uses
    )
