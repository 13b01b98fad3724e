"""One matmul in the place of several with slices of one weight, in the graph of a rank.

A packed projection (query, key and value in one weight) is planned as one matmul per slice, so that each can be split
(autopar/capture/passes/projections.py). Where a plan splits none of them, all slices are on every rank: one matmul with
the whole weight, sliced afterwards, has fewer launches, and its backward makes the weight's gradient at once, where
every slice would put its own among zeros.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.runtime.implementations.experts import grouped_mm
from autopar.runtime.recompute.marks import MARK, role_of

aten = torch.ops.aten

OUTPUT_DIM: dict[Any, int] = {aten.linear.default: 0, aten.matmul.default: 1, aten.bmm.default: 2, grouped_mm: 2}
"""Product → the weight's dim that becomes the last dim of its output."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A product of `x` with part of a weight, and with the same part of a bias where one is added."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    start: int
    end: int
    product: fx.Node
    output: fx.Node
    """The product, or its sum with the bias."""


def pack_products(graph: fx.Graph, widths: Mapping[Any, int]) -> None:
    """Make one matmul of those with all slices of one weight; `widths` is slice → the size that it takes a part of."""
    groups: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)
    for node in graph.nodes:
        piece = _piece(node) if node.target in OUTPUT_DIM else None
        if piece is not None:
            width = widths.get(_slice_of(node.args[1]))
            key = node.target, piece.x, piece.weight, piece.bias, _others(node), role_of(node), width
            groups[key].append(piece)
    for (*_, width), pieces in groups.items():
        in_order = sorted(pieces, key=lambda piece: piece.start)
        places = [0, *(piece.end for piece in in_order)]
        if len(pieces) > 1 and places[-1] == width and places[:-1] == [piece.start for piece in in_order]:
            _pack(graph, pieces[0], in_order)


def _piece(node: fx.Node) -> Piece | None:
    """Describe a product whose weight is part of another; None if it is not, or its own bias is no such part."""
    x, weight = node.args[:2]
    taken = _part(_slice_of(weight), OUTPUT_DIM[node.target] - (_slice_of(weight) is not weight))
    if taken is None or not isinstance(x, fx.Node):
        return None
    whole, start, end = taken
    own = node.args[2] if node.target is aten.linear.default and len(node.args) > 2 else None
    output, bias = node, _part(own, 0)
    if node.target is aten.matmul.default and len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.add.Tensor and user.args[0] is node and not user.kwargs:
            output, bias = user, _part(user.args[1], 0)
    if bias is not None and bias[1:] == (start, end):
        return Piece(x, whole, bias[0], start, end, node, output)
    return None if own is not None else Piece(x, whole, None, start, end, node, node)


def _others(node: fx.Node) -> tuple[Any, ...]:
    """Return a product's arguments behind the weight, but a bias: all slices of a weight have the same."""
    return () if node.target is aten.linear.default else tuple(node.args[2:])


def _slice_of(weight: Any) -> Any:
    """Return the part of matrices that a grouped product takes transposed; every other weight itself."""
    transposed = isinstance(weight, fx.Node) and weight.target is aten.transpose.int and weight.args[1:] == (1, 2)
    return weight.args[0] if transposed else weight


def _part(value: Any, dim: int) -> tuple[fx.Node, int, int] | None:
    """Return the source of a slice along a dim, and the slice's start and end; None if it is no such slice."""
    if not isinstance(value, fx.Node) or value.target is not aten.slice.Tensor or len(value.args) != 4:
        return None
    whole, along, start, end = value.args
    if along != dim or not isinstance(start, int) or not isinstance(end, int):
        return None
    assert isinstance(whole, fx.Node)
    return whole, start, end


def _pack(graph: fx.Graph, first: Piece, pieces: list[Piece]) -> None:
    """Compute all slices where the first of them was computed."""

    def emit(like: fx.Node, target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = dict(like.meta)
        return node

    target: Any = first.product.target
    is_sum = first.output is not first.product
    with graph.inserting_before(first.product):
        bias = () if is_sum or first.bias is None else (first.bias,)
        like, weight = first.product.args[1], first.weight
        assert isinstance(like, fx.Node)
        weight = weight if _slice_of(like) is like else emit(like, aten.transpose.int, weight, 1, 2)
        packed = emit(first.product, target, first.x, weight, *bias, *_others(first.product))
        packed.kwargs = first.product.kwargs
    with graph.inserting_before(first.output):
        if is_sum:
            packed = emit(first.output, aten.add.Tensor, packed, first.bias)
        sizes = [piece.end - piece.start for piece in pieces]
        parts = emit(first.output, aten.split_with_sizes.default, packed, sizes, -1)
        taken = [emit(first.output, operator.getitem, parts, number) for number in range(len(pieces))]
    for node in (parts, *taken):
        role = role_of(node)
        if role is not None:
            node.meta[MARK] = replace(role, saved=False)  # parts of what may be kept are views of it
    for piece, part in zip(pieces, taken, strict=True):
        piece.output.replace_all_uses_with(part)
        for node in dict.fromkeys((piece.output, piece.product)):
            taken_from = [
                each for each in node.all_input_nodes if each.target in (aten.slice.Tensor, aten.transpose.int)
            ]
            graph.erase_node(node)
            for each in taken_from:
                for dead in (each, *(each.all_input_nodes if each.target is aten.transpose.int else ())):
                    if not dead.users and dead.op == "call_function":
                        graph.erase_node(dead)
