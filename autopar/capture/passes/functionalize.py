"""In-place operations become ordinary ones: a new value for what was written and for all that shares its memory.

Each tensor of the graph is a variable: a root that owns memory, or a view, one operation away from its parent. A write
to a view is carried up to its root (slice → slice_scatter, select → select_scatter, transpose → transpose …); other
views of that root are made again from its new value when they are next read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import is_batchedtensor
from torch.fx.node import map_arg

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, is_write, shape_of, value_of
from autopar.errors import CaptureError

Inverse = Callable[[TracedGraph, fx.Node, fx.Node, Mapping[str, Any]], fx.Node]
"""(draft, parent's value, the view's new value, the view's arguments) → the parent's new value."""


@dataclass(slots=True)
class Variable:
    """A tensor that may change: its node of now, and how it is made from its parent."""

    node: fx.Node
    parent: Variable | None = None
    view: fx.Node | None = None
    """The call that makes it from its parent; None where it is the parent itself under another name."""
    version: int = 0
    """Of a root: how often it was written. Of a view: the root's version at which `node` was made."""

    @property
    def root(self) -> Variable:
        return self if self.parent is None else self.parent.root


@dataclass(slots=True)
class Memory:
    """The variables of a graph."""

    draft: TracedGraph
    variables: dict[fx.Node, Variable] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Variable:
        return self.variables.setdefault(node, Variable(node))

    def read(self, variable: Variable) -> fx.Node:
        """A node with the variable's value of now."""
        if variable.parent is not None and variable.version != variable.root.version:
            parent = self.read(variable.parent)
            variable.node = parent if variable.view is None else self._again(variable.view, parent)
            variable.version = variable.root.version
        return variable.node

    def write(self, variable: Variable, new: fx.Node) -> None:
        """Give the variable a new value, and with it everything it is a view of."""
        if variable.parent is None:
            variable.version += 1
        elif variable.view is None:
            self.write(variable.parent, new)
        else:
            parent = self.read(variable.parent)
            self.write(variable.parent, _write_back(self.draft, variable.view, parent, new))
        variable.node = new
        variable.version = variable.root.version

    def _again(self, view: fx.Node, parent: fx.Node) -> fx.Node:
        """The view of the parent's value of now."""
        if view.target is operator.getitem:
            pieces = view.args[0]
            assert isinstance(pieces, fx.Node)
            pieces = self._again(pieces, parent)
            return self.draft.call(operator.getitem, pieces, view.args[1], module=view.meta["module"])
        target: Any = view.target
        kwargs: dict[str, Any] = dict(view.kwargs)
        return self.draft.call(target, parent, *view.args[1:], module=view.meta["module"], **kwargs)


def functionalize(draft: TracedGraph) -> None:
    """Replace every in-place operation; the new values of written buffers become further outputs of the graph."""
    if not any(is_write(node.target) for node in draft.calls()):
        return
    memory = Memory(draft)
    for node in list(draft.graph.nodes):
        if node.op == "placeholder":
            memory.of(node)
        elif node.op == "call_function":
            _functionalize_call(memory, node)
        elif node.op == "output":
            _functionalize_output(memory, node)
    for node in reversed(draft.calls()):
        if is_write(node.target) and not node.users:
            draft.graph.erase_node(node)


def _functionalize_call(memory: Memory, node: fx.Node) -> None:
    draft = memory.draft
    sources = list(node.all_input_nodes)
    with draft.graph.inserting_before(node):
        if is_write(node.target):
            target = node.args[0]
            assert isinstance(target, fx.Node)
            written = memory.of(target)
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: memory.read(memory.of(n)))
            memory.write(written, _functional(draft, node, args, kwargs))
            memory.variables[node] = Variable(written.node, written, None, written.root.version)
            return
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: memory.read(memory.of(n)))
    origin = _origin(node, sources)
    if origin is not None:
        parent = memory.of(origin)
        memory.variables[node] = Variable(node, parent, node, parent.root.version)


def _functionalize_output(memory: Memory, node: fx.Node) -> None:
    draft = memory.draft
    with draft.graph.inserting_before(node):
        outputs = map_arg(node.args[0], lambda n: memory.read(memory.of(n)))
        written = [p for p in draft.placeholders() if memory.of(p).version]
        for placeholder in written:
            source = placeholder.meta["source"]
            if source.kind != "buffer":
                raise CaptureError(_MUTATION[source.kind].format(name=source.name or placeholder.name))
        node.args = ((*outputs, *(memory.read(memory.of(p)) for p in written)),)  # type: ignore[misc]
    draft.mutations = tuple(p.meta["source"].name for p in written)


_MUTATION = {
    "parameter": "the forward writes into the parameter {name}; autopar trains parameters only through an optimizer. "
    "Register what the forward changes as a buffer, or compute with a copy.",
    "constant": "the forward writes into a tensor ({name}) that is neither parameter nor buffer: an attribute "
    "(register it with register_buffer, so that autopar knows its name), or the .data of a parameter, which only an "
    "optimizer may write.",
    "input": "the forward writes into its input {name}; clone the input before writing into it.",
}


def _origin(node: fx.Node, sources: list[fx.Node]) -> fx.Node | None:
    """The node whose memory this call's output shares, if any; by storage, as fake tensors share it too."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not sources:
        return None
    first = sources[0]
    if node.target is operator.getitem:
        first = next(iter(first.all_input_nodes), first)
    other = first.meta["val"]
    if any(isinstance(each, Tensor) and is_batchedtensor(each) for each in (value, other)):
        raise CaptureError(
            f"a function under torch.vmap in {node.meta['module'] or 'the forward'} writes into a tensor, which cannot "
            "be traced back through vmap; build the result without writing in place (x + 1 for x.add_(1), torch.where)."
        )
    shared = isinstance(other, Tensor) and _storage(other) == _storage(value)
    return first if shared else None


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _functional(draft: TracedGraph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """The value that an in-place call gives, by an operation that writes nothing; with the dtype of what it wrote."""
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
        new = draft.call(_without_write(operation, args, module), *args, module=module, **kwargs)
    dtype = value_of(node).dtype
    if value_of(new).dtype != dtype:
        new = draft.call(aten.to.dtype, new, dtype, module=module)
    if shape_of(new) != shape_of(node):
        new = draft.call(aten.expand.default, new, list(shape_of(node)), module=module)
    if operation in OVERWRITES and value_of(target).requires_grad:
        # What is overwritten keeps a gradient, of zeros: to an optimizer that is not the same as none.
        new = _over(draft, target, new, module)
    return new


def _over(draft: TracedGraph, target: fx.Node, new: fx.Node, module: str) -> fx.Node:
    """The new value, computed from the one that it overwrites; a tensor without dims gets one for that."""
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


def _without_write(operation: torch._ops.OpOverload, args: Any, module: str) -> torch._ops.OpOverload:
    """`aten.add.Tensor` for `aten.add_.Tensor`."""
    if operation in UNLIKE and None not in args:
        return UNLIKE[operation]
    name, overload = operation._schema.name.partition("::")[2], operation._overloadname
    packet = getattr(aten, name.removesuffix("_"), None) if operation.namespace == "aten" else None
    if name.endswith("_") and packet is not None and overload in packet.overloads() and operation not in UNLIKE:
        return getattr(packet, overload)
    raise CaptureError(
        f"{operation} in {module or 'the forward'} writes into its arguments and has no form that does not; "
        "use an operation that returns a new tensor."
    )


def _write_back(draft: TracedGraph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """The parent's value after a write of `new` to its view."""
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
    """As `_write_back`, for one piece of split, chunk or unbind."""
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
