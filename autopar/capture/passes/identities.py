"""Calls that give their own input: casts to the same dtype, views of the same shape, dropout(0), x + 0 …"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, value_of


def drop_identities(draft: TracedGraph) -> None:
    """Let the users of such a call read its input."""
    for node in draft.calls():
        test = IDENTITIES.get(node.target)
        if (
            test is not None
            and isinstance(node.args[0], fx.Node)
            and _gives_its_input(node, node.args[0])
            and test(node)
        ):
            draft.replace(node, node.args[0])


_Test = Callable[[fx.Node], bool]


def _always(node: fx.Node) -> bool:
    return True


def _no_gradient(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return not value_of(source).requires_grad


def _drops_nothing(node: fx.Node) -> bool:
    given = arguments(node)
    return given["p"] == 0 or not given["train"]


def _adds_nothing(node: fx.Node) -> bool:
    other = node.args[1]
    return isinstance(other, int | float) and other == 0


def _scales_by_one(node: fx.Node) -> bool:
    other = node.args[1]
    return isinstance(other, int | float) and other == 1


def _keeps_all(node: fx.Node) -> bool:
    given = arguments(node)
    return given["step"] == 1


IDENTITIES: dict[object, _Test] = {
    aten.to.dtype: _always,
    aten.to.dtype_layout: _always,
    aten.to.device: _always,
    aten.to.other: _always,
    aten._to_copy.default: _always,
    aten.type_as.default: _always,
    aten.contiguous.default: _always,
    aten.clone.default: _always,
    aten.lift_fresh_copy.default: _always,
    aten.lift_fresh.default: _always,
    aten.alias.default: _always,
    aten.positive.default: _always,
    aten.detach.default: _no_gradient,
    aten.detach_.default: _no_gradient,
    aten.view.default: _always,
    aten.reshape.default: _always,
    aten._unsafe_view.default: _always,
    aten.view_as.default: _always,
    aten.reshape_as.default: _always,
    aten.flatten.using_ints: _always,
    aten.unflatten.int: _always,
    aten.expand.default: _always,
    aten.expand_as.default: _always,
    aten.broadcast_to.default: _always,
    aten.squeeze.default: _always,
    aten.squeeze.dim: _always,
    aten.slice.Tensor: _keeps_all,
    aten.dropout.default: _drops_nothing,
    aten.feature_dropout.default: _drops_nothing,
    aten.add.Tensor: _adds_nothing,
    aten.add.Scalar: _adds_nothing,
    aten.sub.Tensor: _adds_nothing,
    aten.sub.Scalar: _adds_nothing,
    aten.mul.Tensor: _scales_by_one,
    aten.mul.Scalar: _scales_by_one,
    aten.div.Tensor: _scales_by_one,
    aten.div.Scalar: _scales_by_one,
}


def _gives_its_input(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a call's output has the shape, strides and dtype of its input."""
    found, given = node.meta["val"], source.meta["val"]
    alike = isinstance(found, Tensor) and isinstance(given, Tensor) and found.dtype == given.dtype
    return alike and found.shape == given.shape and found.stride() == given.stride()
