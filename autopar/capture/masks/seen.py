"""Share of the scores that a mask leaves, derived from positions and not from data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg

from autopar.capture.passes.traced_graph import value_of
from autopar.ir.program.operators.attention.expressions import Bounds, parse
from autopar.ir.program.operators.attention.masked_blocks import block_size, bounds_of, known_of, places

RISING = 1.5
"""Ratio of scores seen by the second and the first half of the queries from which later queries count as busier."""

LARGEST = 2**24
"""Elements of a tensor that is worked out."""


def share_seen(text: str, vectors: Sequence[fx.Node], num_queries: int, num_keys: int) -> tuple[float, bool]:
    """Return the share of the scores in blocks that may be seen whatever the data, and whether later queries see
    more.
    """
    sizes = block_size(num_queries), block_size(num_keys)
    blocks = places(num_queries, sizes[0]), places(num_keys, sizes[1])
    known: dict[fx.Node, Tensor | None] = {}
    within = [bounds_without_data(constant(node, known), value_of(node), *sizes) for node in vectors]
    hidden, _ = known_of(parse(text), within, len(blocks[0]), len(blocks[1]))
    seen = (~hidden).double().mean(1)
    half = len(seen) // 2
    return seen.mean().item(), bool(half and seen[half:].mean() >= RISING * seen[:half].mean())


def bounds_without_data(constant: Tensor | None, value: Tensor, queries: int, keys: int) -> Bounds:
    """Return lower and upper bounds of a vector in blocks of so many queries and keys.

    Without a known constant the bounds are False and True, or minus and plus infinity.
    """
    if constant is not None:
        return bounds_of(constant, queries, keys)
    if value.dtype is torch.bool:
        return torch.zeros(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    anything = torch.full((1, 1), math.inf, dtype=torch.float64)
    return -anything, anything


def constant(node: fx.Node, known: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """Return the value of a tensor that no input has a part in; None of others, and of random ones."""
    if node not in known:
        known[node] = _worked_out(node, known)
    return known[node]


def constants(nodes: Sequence[fx.Node]) -> list[Tensor] | None:
    """Return the values of tensors; None where data has a part in any of them."""
    known: dict[fx.Node, Tensor | None] = {}
    found = [x for x in (constant(node, known) for node in nodes) if x is not None and not x.is_meta]
    return found if len(found) == len(nodes) else None


def _worked_out(node: fx.Node, known: dict[fx.Node, Tensor | None]) -> Tensor | None:
    if isinstance(node.meta["val"], Tensor) and node.meta["val"].numel() > LARGEST:
        return None
    if node.op == "placeholder":
        value = node.meta["source"].value
        return None if isinstance(value, FakeTensor) else value
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    sources = {source: constant(source, known) for source in node.all_input_nodes}
    if any(value is None or value.is_meta for value in sources.values()):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), sources.__getitem__)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    return node.target(*args, **kwargs)
