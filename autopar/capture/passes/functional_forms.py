"""The operation that gives what an in-place call or an `out=` call writes, and writes nothing itself."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph, aten, shape_of, value_of
from autopar.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor argument that a call writes into."""

    name: str
    node: fx.Node
    is_out: bool
    """True if its value before the call is not read."""


def functional_values(draft: TracedGraph, node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> list[fx.Node]:
    """Return the new value of each tensor that a call writes, in the order of `written_arguments`.

    Args:
        draft: the graph, which calls are added to.
        node: the call that writes.
        args, kwargs: its arguments with their values of now.

    Raises:
        CaptureError: the call has no form that writes nothing.
    """
    if not written_arguments(node)[0].is_out:
        return [_in_place(draft, node, args, kwargs)]
    return _outputs(draft, node, args, kwargs)


def written_arguments(node: fx.Node) -> list[Written]:
    """Return the tensors that a call writes into, as its schema names them."""
    assert isinstance(node.target, torch._ops.OpOverload)
    found = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if not isinstance(value, fx.Node):
            raise _no_form(node.target, node.meta["module"])
        found.append(Written(argument.name, value, argument.is_out))
    return found


def _in_place(draft: TracedGraph, node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> fx.Node:
    """Return the value that an in-place call gives, in the dtype and shape of what it writes."""
    module, target = node.meta["module"], args[0]
    operation = node.target
    assert isinstance(operation, torch._ops.OpOverload)
    if operation in (aten.copy_.default, aten.fill_.Tensor):
        new = args[1]
    elif operation is aten.zero_.default:
        new = draft.call(aten.zeros_like.default, target, module=module)
    elif operation is aten.fill_.Scalar:
        new = draft.call(aten.full_like.default, target, args[1], module=module)
    else:
        if operation in DRAWS and value_of(target).requires_grad:
            args = (draft.call(aten.detach.default, target, module=module), *args[1:])
        new = draft.call(*_without_write(operation, args, module), module=module, **kwargs)
    new = _cast(draft, new, value_of(target).dtype, module)
    if shape_of(new) != shape_of(target):
        new = draft.call(aten.expand.default, new, list(shape_of(target)), module=module)
    if operation in OVERWRITES and value_of(target).requires_grad:
        # An overwritten tensor gets a gradient of zeros, which an optimizer treats unlike None.
        new = _new_value(draft, target, new, module)
    return new


def _outputs(draft: TracedGraph, node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> list[fx.Node]:
    """Return what an `out=` call computes, one value for each tensor of `out`."""
    module, operation = node.meta["module"], node.target
    assert isinstance(operation, torch._ops.OpOverload)
    outs = [written.name for written in written_arguments(node)]
    given = {name: value for name, value in kwargs.items() if name not in outs}
    functional = _without_out(operation, module)
    if "dtype" not in given and any(argument.name == "dtype" for argument in functional._schema.arguments):
        given["dtype"] = value_of(kwargs[outs[0]]).dtype
    computed = draft.call(functional, *args, module=module, **given)
    pieces = [computed]
    if len(outs) > 1:
        pieces = [draft.call(operator.getitem, computed, index, module=module) for index in range(len(outs))]
    found = []
    for name, new in zip(outs, pieces, strict=True):
        target = kwargs[name]
        found.append(_cast(draft, new, value_of(target).dtype, module))
    return found


FACTORY = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that a call without `out=` has to describe the tensor that it makes."""


def _without_out(operation: torch._ops.OpOverload, module: str) -> torch._ops.OpOverload:
    """Return `aten.div.Tensor` for `aten.div.out`: the overload that takes the same arguments but for `out`."""
    wanted = [(a.name, str(a.type)) for a in operation._schema.arguments if not a.is_out]
    described = FACTORY - {name for name, _ in wanted}
    packet = operation.overloadpacket
    for overload in map(packet.__getattr__, packet.overloads()):
        schema = overload._schema
        found = [(a.name, str(a.type)) for a in schema.arguments if a.name not in described]
        if not schema.is_mutable and found == wanted:
            return overload
    raise _no_form(operation, module)


def _cast(draft: TracedGraph, value: fx.Node, dtype: torch.dtype, module: str) -> fx.Node:
    return value if value_of(value).dtype == dtype else draft.call(aten.to.dtype, value, dtype, module=module)


def _new_value(draft: TracedGraph, target: fx.Node, new: fx.Node, module: str) -> fx.Node:
    """Return the new value, computed from the one that it overwrites; a tensor without dims gets one for that."""
    if shape_of(target):
        return draft.call(aten.slice_scatter.default, target, new, module=module)
    lines = [draft.call(aten.unsqueeze.default, each, 0, module=module) for each in (target, new)]
    return draft.call(aten.squeeze.dim, draft.call(aten.slice_scatter.default, *lines, module=module), 0, module=module)


RANDOM_BETWEEN = getattr(aten.random_, "from")  # a graph cannot write down a call that is named like a word of Python
UNLIKE = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    RANDOM_BETWEEN: aten.randint_like.low_dtype,
}
"""Operations that are called otherwise where they write nothing."""
DRAWS = (
    aten.bernoulli_.float,
    aten.bernoulli_.Tensor,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    RANDOM_BETWEEN,
    aten.uniform_.default,
)
"""Operations that fill a tensor with random numbers."""
OVERWRITES = (aten.copy_.default, aten.fill_.Tensor, aten.fill_.Scalar, aten.zero_.default, *DRAWS)


def _without_write(operation: torch._ops.OpOverload, args: Any, module: str) -> tuple[Any, ...]:
    """Return `aten.add.Tensor` for `aten.add_.Tensor`, and its arguments."""
    if operation in UNLIKE:
        # The other form may have no default where this one has.
        missing = [argument.default_value for argument in operation._schema.arguments[len(args) :]]
        args = (*args, *(value for value in missing if value is not None))
        if None not in args:
            return UNLIKE[operation], *args
    name, overload = operation._schema.name.partition("::")[2], operation._overloadname
    packet = getattr(aten, name.removesuffix("_"), None) if operation.namespace == "aten" else None
    if name.endswith("_") and packet is not None and overload in packet.overloads() and operation not in UNLIKE:
        return getattr(packet, overload), *args
    raise _no_form(operation, module)


def _no_form(operation: torch._ops.OpOverload, module: str) -> CaptureError:
    return CaptureError(
        f"{operation} in {module or 'the forward'} writes into its arguments and has no form that does not; "
        "use an operation that returns a new tensor."
    )
