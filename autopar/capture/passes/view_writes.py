"""A write to a view, carried up to the tensor that it is a view of: slice → slice_scatter, transpose → transpose …"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of, value_of
from autopar.errors import CaptureError

Inverse = Callable[[TracedGraph, fx.Node, fx.Node, Mapping[str, Any]], fx.Node]
"""(draft, parent's value, the view's new value, the view's arguments) → the parent's new value."""


def written_parent(draft: TracedGraph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Return the parent's value after a write of `new` to its view."""
    if view.target is operator.getitem:
        return _write_piece(draft, view, parent, new)
    if shape_of(view) == shape_of(parent) and _strides(view) == _strides(parent):
        return new
    inverse = INVERSES.get(view.target)  # type: ignore[arg-type]
    if inverse is None or value_of(view).dtype != value_of(parent).dtype:
        raise CaptureError(
            f"the forward writes through the view {view.target} in {view.meta['module'] or 'its root'}, which cannot "
            "be traced back; write into a clone, or build the result with torch.where or torch.cat."
        )
    return inverse(draft, parent, new, arguments(view))


def _strides(node: fx.Node) -> tuple[int, ...]:
    return value_of(node).stride()


def _write_piece(draft: TracedGraph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Return the parent's value after a write to one output of split, chunk or unbind, as `written_parent` does."""
    pieces, index = view.args
    assert isinstance(pieces, fx.Node) and isinstance(index, int)
    dim = arguments(pieces)["dim"]
    if pieces.target is aten.unbind.int:
        return draft.call(aten.select_scatter.default, parent, new, dim, index, module=view.meta["module"])
    sizes = [piece.shape[dim] for piece in pieces.meta["val"]]
    start, end = sum(sizes[:index]), sum(sizes[: index + 1])
    return draft.call(aten.slice_scatter.default, parent, new, dim, start, end, module=view.meta["module"])


def _same_order(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    if value_of(new).numel() != value_of(parent).numel():
        raise CaptureError("the forward writes into an expanded tensor, whose elements share memory; clone it first.")
    return draft.call(aten.reshape.default, new, list(shape_of(parent)), module=parent.meta["module"])


def _slice(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    where = (given["dim"], given["start"], given["end"], given["step"])
    return draft.call(aten.slice_scatter.default, parent, new, *where, module=parent.meta["module"])


def _select(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    return draft.call(
        aten.select_scatter.default, parent, new, given["dim"], given["index"], module=parent.meta["module"]
    )


def _narrow(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    where = (given["dim"], given["start"], given["start"] + given["length"])
    return draft.call(aten.slice_scatter.default, parent, new, *where, module=parent.meta["module"])


def _diagonal(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    where = (given["offset"], given["dim1"], given["dim2"])
    return draft.call(aten.diagonal_scatter.default, parent, new, *where, module=parent.meta["module"])


def _transpose(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    return draft.call(aten.transpose.int, new, given["dim0"], given["dim1"], module=parent.meta["module"])


def _last_two(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    if len(shape_of(parent)) < 2:
        return new
    return draft.call(aten.transpose.int, new, -2, -1, module=parent.meta["module"])


def _all_reversed(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    return draft.call(aten.numpy_T.default, new, module=parent.meta["module"])


def _permute(draft: TracedGraph, parent: fx.Node, new: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    dims = [dim % len(given["dims"]) for dim in given["dims"]]
    return draft.call(
        aten.permute.default, new, [dims.index(d) for d in range(len(dims))], module=parent.meta["module"]
    )


INVERSES: dict[Any, Inverse] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.narrow.default: _narrow,
    aten.diagonal.default: _diagonal,
    aten.transpose.int: _transpose,
    aten.t.default: _last_two,
    aten.mT.default: _last_two,
    aten.numpy_T.default: _all_reversed,
    aten.permute.default: _permute,
    aten.view.default: _same_order,
    aten.reshape.default: _same_order,
    aten._unsafe_view.default: _same_order,
    aten.view_as.default: _same_order,
    aten.reshape_as.default: _same_order,
    aten.flatten.using_ints: _same_order,
    aten.unflatten.int: _same_order,
    aten.squeeze.default: _same_order,
    aten.squeeze.dim: _same_order,
    aten.squeeze.dims: _same_order,
    aten.unsqueeze.default: _same_order,
}
