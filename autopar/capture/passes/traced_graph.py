"""A graph on its way from `torch.export` to a `Program`: fake values on every node, so that passes see what runs.

node.meta["val"]     what the node gives, as fake tensors that know shape, strides, dtype and requires_grad
node.meta["module"]  dotted path of the module that made the call
node.meta["source"]  of a placeholder: what it stands for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.capture.passes.refused_calls import check_result, not_evaluated

aten = torch.ops.aten

Kind = Literal["parameter", "buffer", "constant", "input"]


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a placeholder: a parameter or buffer by name, a lifted constant, or the input leaf `index`."""

    kind: Kind
    name: str = ""
    index: int = -1
    value: Tensor | None = None


@dataclass(slots=True)
class TracedGraph:
    """A graph that passes rewrite in place, and the fake mode that its values live in."""

    graph: fx.Graph
    mode: FakeTensorMode
    mutations: tuple[str, ...] = ()
    """Buffers whose new values follow the user's outputs."""
    seen: dict[object, Any] = field(default_factory=dict)
    """Results of evaluated calls, by `call_key`, so that equal layers are evaluated once."""

    def copied(self) -> TracedGraph:
        """Return a copy of the graph, for passes that must not change this one."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return TracedGraph(graph, self.mode, self.mutations, self.seen)

    def call(
        self, target: Callable[..., Any], *args: Any, module: str = "", own: bool = False, **kwargs: Any
    ) -> fx.Node:
        """Insert a call at the graph's insertion point, with its fake value; `own` as in `evaluate`."""
        value = self.evaluate(target, args, kwargs, module, own)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        node.meta["module"] = module
        return node

    def evaluate(self, target: Callable[..., Any], args: Any, kwargs: Any, module: str = "", own: bool = False) -> Any:
        """Return the result of a call on fake tensors; gradients are recorded, so that requires_grad is autograd's own.

        Args:
            own: the value belongs to this call alone, and is not that of an equal one: something writes into its
                memory, which may change what else is known of it.

        Raises CaptureError if the result or its shape depends on the values of tensors, and if it is not dense.
        """
        key = None if own or is_write(target) else call_key(target, args, kwargs)
        if key is not None and key in self.seen:
            return self.seen[key]
        args, kwargs = map_arg((args, kwargs), lambda node: node.meta["val"])
        with self.mode, torch.enable_grad():
            try:
                value = target(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                raise not_evaluated(target, module, error) from error
        check_result(target, value, module)
        if key is not None and _description(value) is not None:
            self.seen[key] = value
        return value

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Let every user of `node` read `new`, and drop `node`."""
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def calls(self, *targets: Callable[..., Any]) -> list[fx.Node]:
        """Return the calls of any of `targets` (of anything, when none is given), in order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and (not targets or n.target in targets)]

    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]


PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that mean the same wherever they are equal and of one type."""


def call_key(target: Callable[..., Any], args: Any, kwargs: Any) -> object:
    """Return a hashable key that determines the shapes, strides, dtypes and requires_grad of a call's outputs.

    None if they depend on more: a size that is not a plain number, or an object.
    """
    described = _description(args), _description(kwargs)
    return None if None in described else (target, described)


def _description(value: Any) -> object:
    """Return a hashable description of an argument or an output; None where there is none."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, Tensor):
        if value._has_symbolic_sizes_strides or value.layout != torch.strided:
            return None
        memory = value.shape, value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()
        return *memory, value.dtype, value.device, value.requires_grad
    if isinstance(value, list | tuple):
        parts = tuple(map(_description, value))
        return None if None in parts else parts
    if isinstance(value, dict):
        parts = _description(tuple(value.values()))
        return None if parts is None else (tuple(value), parts)
    # 1, 1.0 and True are equal, yet give other dtypes.
    return (type(value), value) if isinstance(value, PLAIN) else None


def is_write(target: object) -> bool:
    """Return whether a call of `target` writes into its arguments according to its schema."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that a call of `target` writes into, as its schema says."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def storages(value: Any) -> set[int]:
    """Return the memory of a value's tensors; sparse ones, and those that a transform has in hand, have none to ask."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and torch._C._has_storage(leaf)]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def set_call(node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Let a node be another call that gives the same value."""
    node.target, node.args, node.kwargs = target, args, kwargs


def value_of(node: fx.Node) -> Tensor:
    """Return the fake value of a node with one tensor output."""
    found = node.meta["val"]
    assert isinstance(found, Tensor), f"{node} gives {type(found).__name__}"
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node with one tensor output."""
    return tuple(value_of(node).shape)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by schema name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    named: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            named[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value
    return named


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the module that made the call, from the module stack that `torch.export` keeps."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return ".".join(part.partition("@")[0] for part in path.split(".")).removeprefix("L['self']").lstrip(".")
