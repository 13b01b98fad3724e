"""Matmuls in the form that shards: batch and sequence apart, and one matmul per slice of a packed weight.

A packed projection (query, key and value in one weight) splits its output at places that a sharded dim does not know:
half of the packed outputs is all of the query and half of the key. One matmul per slice has dims that mean one thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.capture.passes.packed_outputs import Piece, pieces_of
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of, value_of
from autopar.capture.passes.views import VIEWS
from autopar.ir.program.operators.expert_operators import GROUPED_MM

BY_EXPERTS = (GROUPED_MM, aten.bmm.default)
"""Products with a matrix for each expert."""


def flat_projections_to_batched(draft: TracedGraph) -> None:
    """Replace x.view(-1, k) → product → view by a product of x itself; addmm by matmul and add."""
    for node in draft.calls(aten.addmm.default, aten.mm.default, aten.linear.default):
        given = arguments(node)
        flat: Any = given["mat1"] if node.target is aten.addmm.default else given.get("input", given.get("self"))
        users = list(node.users)
        if not users or any(user.target not in VIEWS for user in users):
            continue
        wanted = shape_of(users[0])
        source = _before_flattening(flat, wanted[:-1])
        same = all(shape_of(user) == wanted for user in users) and wanted[-1] == shape_of(node)[-1]
        if source is None or not same or given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
            continue
        with draft.graph.inserting_before(node):
            batched = _with_leading_dims_apart(draft, source, flat, (*wanted[:-1], shape_of(flat)[-1]))
            new = _with_left_side(draft, node, given, batched)
        for user in users:
            draft.replace(user, new)


def packed_projections_to_separate(draft: TracedGraph) -> None:
    """Replace a matmul whose output is only sliced along its last dim by one matmul per slice of its weight."""
    for node in draft.calls(aten.linear.default, aten.matmul.default, *BY_EXPERTS):
        packed = _packed_experts(node) if node.target in BY_EXPERTS else _packed(node)
        if packed is None:
            continue
        pieces = pieces_of(packed.output)
        for piece in pieces or ():
            with draft.graph.inserting_before(packed.output):
                product = _piece_product(draft, packed, piece)
            with draft.graph.inserting_before(piece.node):
                draft.replace(piece.node, piece.arranged(draft, product))


@dataclass(frozen=True, slots=True)
class Packed:
    """A product with a parameter, and the bias added to it."""

    product: fx.Node
    output: fx.Node
    """The product, or the sum with the bias."""
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    weight_dim: int
    """The weight's dim that becomes the last dim of the output."""


def _packed(node: fx.Node) -> Packed | None:
    x, weight = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not _is_parameter(weight):
        return None
    if len(shape_of(weight)) != 2 or len(shape_of(x)) < 2:
        return None
    if node.target is aten.linear.default:
        bias: Any = arguments(node)["bias"]
        return Packed(node, node, x, weight, bias, 0) if bias is None or _is_parameter(bias) else None
    user = next(iter(node.users), None)
    if len(node.users) == 1 and user is not None and user.target is aten.add.Tensor and user.args[0] is node:
        bias = user.args[1]
        if isinstance(bias, fx.Node) and _is_parameter(bias) and len(shape_of(bias)) == 1 and not user.kwargs:
            return Packed(node, user, x, weight, bias, 1)
    return Packed(node, node, x, weight, None, 1)


def _packed_experts(node: fx.Node) -> Packed | None:
    """Return a product with the matrices of a parameter, one for each expert, which may be transposed for it."""
    x, weight = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if _is_transposed(weight) and isinstance(weight.args[0], fx.Node) and _is_of_experts(weight.args[0]):
        return Packed(node, node, x, weight.args[0], None, 1)
    return Packed(node, node, x, weight, None, 2) if _is_of_experts(weight) else None


def _is_of_experts(node: fx.Node) -> bool:
    """Return whether matrices are a parameter, or a slice of a parameter along its dim of experts."""
    some = node.target is aten.slice.Tensor and node.args[1] == 0 and isinstance(node.args[0], fx.Node)
    return _is_parameter(node.args[0]) if some else _is_parameter(node)  # type: ignore[arg-type]


def _is_transposed(node: fx.Node) -> bool:
    """Return whether a call swaps the two matrix dims of a tensor of three dims."""
    return node.target is aten.transpose.int and {dim % 3 for dim in node.args[1:]} == {1, 2}  # type: ignore[operator]


def _piece_product(draft: TracedGraph, packed: Packed, piece: Piece) -> fx.Node:
    module, dim = packed.product.meta["module"], packed.weight_dim
    weight = draft.call(aten.slice.Tensor, packed.weight, dim, piece.start, piece.end, module=module)
    bias = packed.bias
    if bias is not None:
        bias = draft.call(aten.slice.Tensor, bias, 0, piece.start, piece.end, module=module)
    if packed.product.target in BY_EXPERTS:
        weight = weight if dim == 2 else draft.call(aten.transpose.int, weight, 1, 2, module=module)
        return draft.call(packed.product.target, packed.x, weight, *packed.product.args[2:], module=module)  # type: ignore[arg-type]
    if packed.product.target is aten.linear.default:
        return draft.call(aten.linear.default, packed.x, weight, bias, module=module)
    product = draft.call(aten.matmul.default, packed.x, weight, module=module)
    return product if bias is None else draft.call(aten.add.Tensor, product, bias, module=module)


def _with_left_side(draft: TracedGraph, node: fx.Node, given: dict[str, Any], x: fx.Node) -> fx.Node:
    module = node.meta["module"]
    if node.target is aten.linear.default:
        return draft.call(aten.linear.default, x, given["weight"], given["bias"], module=module)
    product = draft.call(aten.matmul.default, x, given["mat2"], module=module)
    if node.target is aten.mm.default:
        return product
    return draft.call(aten.add.Tensor, product, given["self"], module=module)


def _before_flattening(flat: fx.Node, leading: tuple[int, ...]) -> fx.Node | None:
    """Return the tensor with these leading dims that a view made one; seen through the cast of autocast."""
    source = flat.args[0] if flat.args else None
    if not isinstance(source, fx.Node) or len(shape_of(flat)) != 2 or len(leading) < 2:
        return None
    if flat.target is aten.to.dtype:
        return _before_flattening(source, leading)
    return source if flat.target in VIEWS and shape_of(source)[: len(leading)] == leading else None


def _with_leading_dims_apart(draft: TracedGraph, source: fx.Node, flat: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    module, dtype = flat.meta["module"], value_of(flat).dtype
    if shape_of(source) != shape:
        source = draft.call(aten.reshape.default, source, list(shape), module=module)
    return source if value_of(source).dtype == dtype else draft.call(aten.to.dtype, source, dtype, module=module)


def _is_parameter(node: fx.Node) -> bool:
    if node.target is aten.to.dtype and isinstance(node.args[0], fx.Node):
        return _is_parameter(node.args[0])
    return node.op == "placeholder" and node.meta["source"].kind == "parameter"
