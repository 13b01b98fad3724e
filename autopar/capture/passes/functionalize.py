"""In-place operations become ordinary ones: a new value for what was written and for all that shares its memory.

Each tensor of the graph is a variable: a root that owns memory, or a view, one operation away from its parent. A write
to a view is carried up to its root (slice → slice_scatter, select → select_scatter, transpose → transpose …); other
views of that root are made again from its new value when they are next read.

`detach` is a view whose value is its parent's and whose gradient is not. A write through it (`x.detach().add_(1)`,
`x.data.mul_(2)`, any write under `torch.no_grad()`) changes the value of the parent and leaves its gradient. So does
`x.data = y`, which lets x lie in the memory of y.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import is_batchedtensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.capture.passes.functional_forms import functional_values, written_arguments
from autopar.capture.passes.traced_graph import TracedGraph, aten, is_write, storages, value_of
from autopar.capture.passes.view_writes import written_parent
from autopar.errors import CaptureError
from autopar.ir.program.operators.set_data import SET_DATA


@dataclass(slots=True)
class Variable:
    """A tensor that may change: its node of now, and how it is made from its parent."""

    node: fx.Node
    parent: Variable | None = None
    view: fx.Node | None = None
    """The call that makes it from its parent; None where it is the parent itself under another name."""
    version: int = 0
    """Number of writes so far for a root; for a view, the root's version at which `node` was made."""
    keeps_gradient: bool = False
    """True if it has the values of its parent and a gradient of its own, as after `x.data = y`."""

    @property
    def root(self) -> Variable:
        return self if self.parent is None else self.parent.root

    def is_(self, other: Variable) -> bool:
        """Return whether both are one tensor of Python, before and after a write in place."""
        one, two = self, other
        while one.parent is not None and one.view is None and not one.keeps_gradient:
            one = one.parent
        while two.parent is not None and two.view is None and not two.keeps_gradient:
            two = two.parent
        return one is two


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, and the memory that its backward may read."""

    node: fx.Node
    reads: tuple[tuple[fx.Node, Variable, Variable], ...]
    """(argument, its variable, the root of that) as the call was made."""
    result: Variable | None
    """The root that lies where the call's result does, if the call made it."""


@dataclass(slots=True)
class Memory:
    """The variables of a graph."""

    draft: TracedGraph
    variables: dict[fx.Node, Variable] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    """The calls that a gradient flows through, in order."""

    def of(self, node: fx.Node) -> Variable:
        return self.variables.setdefault(node, Variable(node))

    def read(self, variable: Variable) -> fx.Node:
        """Return a node with the variable's value of now."""
        if variable.parent is not None and variable.version != variable.root.version:
            parent = self.read(variable.parent)
            if variable.keeps_gradient or (_is_detached(variable) and value_of(variable.node).requires_grad):
                variable.node = _with_values(self.draft, variable.node, parent)
            else:
                variable.node = parent if variable.view is None else self._view_again(variable.view, parent)
            variable.version = variable.root.version
        return variable.node

    def write(self, variable: Variable, new: fx.Node) -> None:
        """Give the variable a new value, and with it everything it is a view of."""
        if variable.parent is None:
            variable.version += 1
        elif variable.keeps_gradient or _is_detached(variable):
            parent = self.read(variable.parent)
            if value_of(parent).requires_grad:
                self._check_unsaved(variable.root, None)
            self.write(variable.parent, _with_values(self.draft, parent, new))
        elif variable.view is None:
            self.write(variable.parent, new)
        else:
            parent = self.read(variable.parent)
            self.write(variable.parent, written_parent(self.draft, variable.view, parent, new))
        variable.node = new
        variable.version = variable.root.version

    def move(self, variable: Variable, source: Variable) -> Variable:
        """Return the variable that has the gradient of `variable` and lies in the memory of `source`."""
        old = self.read(variable)
        if value_of(old).requires_grad:
            self._check_unsaved(variable.root, variable)
        new = _with_values(self.draft, old, self.read(source))
        return Variable(new, source, version=source.root.version, keeps_gradient=True)

    def note(self, node: fx.Node, read: Iterable[Variable], owns: bool) -> None:
        """Remember what memory the backward of a call may read."""
        if _requires_grad(node):
            reads = tuple((variable.node, variable, variable.root) for variable in read)
            self.calls.append(_Call(node, reads, self.of(node) if owns else None))

    def _check_unsaved(self, root: Variable, only: Variable | None) -> None:
        """Raise CaptureError if a backward reads memory that is to be written past autograd.

        Args:
            root: what is written.
            only: the tensor that leaves this memory (`x.data = y`): results and views keep what they had.
        """
        for call in self.calls:
            inputs = [n for n, variable, of in call.reads if of is root and (only is None or variable.is_(only))]
            result = only is None and call.result is root
            if (inputs or result) and _saves_for_backward(self.draft, call.node, inputs, result):
                raise CaptureError(
                    f"the forward writes past autograd (.data, .detach() or torch.no_grad()) into a tensor that "
                    f"{call.node.target} in {call.node.meta['module'] or 'the forward'} keeps for its backward, whose "
                    "gradient would be wrong in PyTorch, too. Write into a clone of the tensor (x = x.clone())."
                )

    def _view_again(self, view: fx.Node, parent: fx.Node) -> fx.Node:
        """Return the view of the parent's value of now."""
        if view.target is operator.getitem:
            pieces = view.args[0]
            assert isinstance(pieces, fx.Node)
            pieces = self._view_again(pieces, parent)
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
        of_write = node.target is operator.getitem and is_write(node.all_input_nodes[0].target)
        if (is_write(node.target) or of_write) and not node.users:
            draft.graph.erase_node(node)


def _functionalize_call(memory: Memory, node: fx.Node) -> None:
    draft = memory.draft
    with draft.graph.inserting_before(node):
        if node.target is SET_DATA:
            _set_data(memory, node)
            return
        if is_write(node.target):
            _write_new_values(memory, node)
            return
        sources = list(node.all_input_nodes)
        if node.target is operator.getitem and is_write(sources[0].target):
            written = memory.of(written_arguments(sources[0])[node.args[1]].node)  # type: ignore[index]
            memory.variables[node] = Variable(written.node, written, None, written.root.version)
            return
        read = {source: memory.of(source) for source in sources}
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: memory.read(memory.of(n)))
    origin = _source_of_memory(node, sources)
    if origin is not None:
        parent = memory.of(origin)
        memory.variables[node] = Variable(node, parent, node, parent.root.version)
    memory.note(node, read.values(), origin is None)


def _write_new_values(memory: Memory, node: fx.Node) -> None:
    read = [memory.of(source) for source in node.all_input_nodes]
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: memory.read(memory.of(n)))
    written = [memory.of(each.node) for each in written_arguments(node)]
    for variable, new in zip(written, functional_values(memory.draft, node, args, kwargs), strict=True):
        memory.write(variable, new)
        memory.note(new, read, False)
    memory.variables[node] = Variable(written[0].node, written[0], None, written[0].root.version)


def _set_data(memory: Memory, node: fx.Node) -> None:
    """Let a tensor lie in the memory of another one."""
    tensor, source = node.args
    assert isinstance(tensor, fx.Node) and isinstance(source, fx.Node)
    there, moved = memory.of(source), memory.of(tensor)
    while moved.parent is not None and moved.view is None and not moved.keeps_gradient:
        moved = moved.parent
    if moved.view is not None and not _is_detached(moved) and value_of(moved.node).requires_grad:
        raise CaptureError(
            f"the forward assigns the .data of a view ({moved.view.target}) in {node.meta['module'] or 'its root'}, "
            "whose gradient would still follow writes into the tensor that it was a view of; assign that of a clone "
            "(x = x.clone())."
        )
    stored = memory.of(tensor).parent is None and tensor.op == "placeholder"
    if stored and any(memory.of(placeholder) is there.root for placeholder in memory.draft.placeholders()):
        raise CaptureError(
            f"the forward lets {tensor.meta['source'].name or tensor.name} lie in the memory of another parameter, "
            "buffer or input (.data =), which would last beyond the call; assign a clone."
        )
    memory.variables[tensor] = memory.move(memory.of(tensor), there)


def _functionalize_output(memory: Memory, node: fx.Node) -> None:
    draft = memory.draft
    with draft.graph.inserting_before(node):
        outputs = map_arg(node.args[0], lambda n: memory.read(memory.of(n)))
        written = [p for p in draft.placeholders() if memory.of(p).version or memory.of(p).parent is not None]
        for placeholder in written:
            source = placeholder.meta["source"]
            if source.kind != "buffer":
                raise CaptureError(_MUTATION[source.kind].format(name=source.name or placeholder.name))
        node.args = ((*outputs, *(memory.read(memory.of(p)) for p in written)),)  # type: ignore[misc]
    draft.mutations = tuple(p.meta["source"].name for p in written)


_MUTATION = {
    "parameter": "the forward writes into the parameter {name}, and autopar changes parameters through an optimizer "
    "only. Register what the forward changes as a buffer, or compute with a copy.",
    "constant": "the forward writes into a tensor ({name}) that is neither parameter nor buffer; register it with "
    "register_buffer, so that autopar knows its name.",
    "input": "the forward writes into its input {name}; clone the input before writing into it.",
}


def _source_of_memory(node: fx.Node, sources: list[fx.Node]) -> fx.Node | None:
    """Return the node whose memory this call's output shares, if any; by storage, as fake tensors share it too."""
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


def _is_detached(variable: Variable) -> bool:
    """Return whether a variable has the values of its parent, and not its gradient."""
    return variable.view is not None and variable.view.target is aten.detach.default


def _with_values(draft: TracedGraph, tensor: fx.Node, values: fx.Node) -> fx.Node:
    """Return a tensor with these values and the gradient of `tensor`, as after `tensor.data.copy_(values)`."""
    module = tensor.meta["module"]
    if value_of(values).requires_grad:
        values = draft.call(aten.detach.default, values, module=module)
    if not value_of(tensor).requires_grad:
        return values
    # x - x.detach() is zero with the gradient of x; it is NaN where x is not finite.
    before = draft.call(aten.detach.default, tensor, module=module)
    zero = draft.call(aten.sub.Tensor, tensor, before, module=module)
    zero = draft.call(aten.nan_to_num.default, zero, module=module)
    return draft.call(aten.add.Tensor, values, zero, module=module)


def _requires_grad(node: fx.Node) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(node.meta["val"]))


def _saves_for_backward(draft: TracedGraph, node: fx.Node, inputs: Iterable[fx.Node], result: bool) -> bool:
    """Return whether autograd saves one of the inputs of a call for its backward, or its result."""
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.update(storages(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = draft.evaluate(node.target, node.args, node.kwargs, node.meta["module"], own=True)  # type: ignore[arg-type]
    kept = storages([each.meta["val"] for each in inputs]) | (storages(value) if result else set())
    return not kept.isdisjoint(saved)
