"""From what `torch.export` records to what the planner reads: fewer kinds of calls, nothing hidden, nothing in place.

The order matters: in-place operations go first, while views still say whose memory they share; gradients come last,
when the graph is the one that will run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from autopar.draft import Draft, arguments, aten, shape_of, value_of
from autopar.errors import CaptureError
from autopar.functionalize import functionalize
from autopar.projections import flat_projections_to_batched, packed_projections_to_separate
from autopar.program import TensorInfo

Pass = Callable[[Draft], None]


def normalize(draft: Draft) -> None:
    """Rewrite the draft in place, one pass after the other."""
    for rewrite in PASSES:
        rewrite(draft)


def drop_identities(draft: Draft) -> None:
    """Drop calls that give their input: casts to its own dtype, views to its own shape, dropout(0), x + 0 …"""
    for node in draft.calls():
        test = IDENTITIES.get(node.target)  # type: ignore[arg-type]
        if test is not None and isinstance(node.args[0], fx.Node) and _gives(node, node.args[0]) and test(node):
            draft.replace(node, node.args[0])


def state_sizes(draft: Draft) -> None:
    """Give views and expansions explicit sizes; a reshape that moves no memory is a view."""
    for node in draft.calls(*TO_VIEW, *TO_EXPAND):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target in TO_EXPAND:
            target = aten.expand.default
        elif node.target is aten.view.default or value_of(source).is_contiguous():
            target = aten.view.default
        else:
            target = aten.reshape.default
        _set_call(node, target, source, list(shape_of(node)))


def positive_dims(draft: Draft) -> None:
    """Count dims from the front in the calls whose rules speak of dims by number."""
    for node in draft.calls():
        if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        value = node.args[0].meta["val"]
        if node.target not in ONE_DIM or not isinstance(value, Tensor) or not value.ndim:
            continue
        ndim = value.ndim + (node.target is aten.unsqueeze.default)
        for position, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
            given = node.args[position]
            if argument.name in ("dim", "dim0", "dim1") and isinstance(given, int) and given < 0:
                node.update_arg(position, given + ndim)


def drop_dead_calls(draft: Draft) -> None:
    """Drop calls that nothing reads; a batch_norm in training stays, for its running statistics."""
    for node in reversed(draft.calls()):
        keeps_statistics = node.target is aten.batch_norm.default and node.args[5]
        if not node.users and not keeps_statistics:
            draft.graph.erase_node(node)


def drop_unused_placeholders(draft: Draft) -> None:
    """Drop placeholders that nothing reads."""
    for node in draft.placeholders():
        if not node.users:
            draft.graph.erase_node(node)


def on_the_host(draft: Draft) -> None:
    """Let every call that makes a tensor name the CPU; the runtime puts its own device in that place."""
    rehome(draft.graph, torch.device("cpu"))


def propagate(draft: Draft) -> None:
    """Run the graph once more on fake tensors: shapes, dtypes and requires_grad are those of the graph that will run."""
    for node in draft.calls():
        node.meta["val"] = draft.evaluate(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    for node in draft.graph.nodes:
        if node.op != "output":
            node.meta["tensor"] = _info(node, node.meta["val"])


PASSES: tuple[Pass, ...] = (
    functionalize,
    drop_dead_calls,
    drop_identities,
    state_sizes,
    positive_dims,
    flat_projections_to_batched,
    drop_dead_calls,
    packed_projections_to_separate,
    drop_identities,
    drop_dead_calls,
    drop_unused_placeholders,
    on_the_host,
    propagate,
)


def rehome(graph: fx.Graph, device: torch.device) -> None:
    """Let every call that makes a tensor make it on `device`."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        makes = not any(isinstance(arg, fx.Node) for arg in node.args)
        accepts = any(argument.name == "device" for argument in node.target._schema.arguments)
        if node.kwargs.get("device") is not None or (makes and accepts):
            node.update_kwarg("device", device)
        if "pin_memory" in node.kwargs:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "pin_memory"}


TO_EXPAND = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
TO_VIEW = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
ONE_DIM = (
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.chunk.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.cumsum.default,
)

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


def _gives(node: fx.Node, source: fx.Node) -> bool:
    """Whether a call gives a tensor like its input: shape, strides, dtype."""
    found, given = node.meta["val"], source.meta["val"]
    alike = isinstance(found, Tensor) and isinstance(given, Tensor) and found.dtype == given.dtype
    return alike and found.shape == given.shape and found.stride() == given.stride()


def _set_call(node: fx.Node, target: Callable[..., object], *args: object) -> None:
    node.target, node.args, node.kwargs = target, args, {}  # type: ignore[assignment]


def _info(node: fx.Node, value: object) -> TensorInfo | tuple[TensorInfo | None, ...] | None:
    if isinstance(value, Tensor):
        return TensorInfo(tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, tuple | list):
        return tuple(_info(node, each) for each in value)  # type: ignore[misc]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(
            f"{node.target} in {node.meta['module'] or 'the forward'} turns a tensor's value into a number, on which the "
            "graph would depend; keep it a tensor, or give it to the model as an argument that is a plain number."
        )
    return None
