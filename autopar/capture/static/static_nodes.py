"""The values of traced tensors that follow from constants alone, computed from the graph that is being traced."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.passes.traced_graph import is_write, written_arguments
from autopar.capture.python.cone import cone_of, node_of

MAX_ELEMENTS = 2**24
"""Most elements of a tensor whose values are computed while a model is traced."""
MAY_ALIAS = frozenset({"reshape", "contiguous", "to", "flatten", "expand_as", "view_as", "type_as", "lift_fresh"})
"""Operations whose schema says nothing of it, and which may return a view of their first argument."""


def known_value(tensor: Tensor) -> Tensor | None:
    """Return the values of a traced tensor; None if they depend on inputs, weights or random numbers, or are many."""
    node = node_of(tensor)
    if node is None:
        return None
    needed = _computed_from(node)
    if needed is None:
        return None
    values: dict[fx.Node, Any] = {each: _constant_read(each) for each in needed if each.op == "get_attr"}
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        for each in node.graph.nodes:
            if each not in needed:
                continue
            if each.op == "get_attr":
                values[each] = values[each].clone()
            else:
                args, kwargs = map_arg((each.args, each.kwargs), values.__getitem__)  # pyright: ignore[reportGeneralTypeIssues]
                values[each] = each.target(*args, **kwargs)
    return values[node]


def _computed_from(node: fx.Node) -> set[fx.Node] | None:
    """Return the nodes that a node is computed from, writes into their memory included; None if one is not known."""
    needed: set[fx.Node] = set()
    left = [node]
    writes = [(each, _nodes_written(each)) for each in node.graph.nodes if _nodes_written(each)]
    while left:
        for each in cone_of(left.pop()):
            if each not in needed:
                if not _is_known(each):
                    return None
                needed.add(each)
        memory = {_base_of_view(each) for each in needed}
        left += [
            write for write, into in writes if write not in needed and not memory.isdisjoint(map(_base_of_view, into))
        ]
    return needed


def _is_known(node: fx.Node) -> bool:
    """Return whether a node gives the same values in every call, few enough to compute, given those it reads."""
    leaves = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    if any(not isinstance(leaf.numel(), int) or leaf.numel() > MAX_ELEMENTS for leaf in leaves):
        return False
    if node.op == "get_attr":
        return _constant_read(node) is not None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags
    return node.op == "call_function" and getattr(target, "__module__", "") == operator.getitem.__module__


def _constant_read(node: fx.Node) -> Any:
    """Return the tensor that a node reads from the traced module; None if it has no values."""
    mode = get_proxy_mode()
    found = None if mode is None else getattr(mode.tracer.root, str(node.target), None)
    is_real = isinstance(found, Tensor) and not isinstance(found, FakeTensor) and not found.is_meta
    return found if is_real else None


def _nodes_written(node: fx.Node) -> list[fx.Node]:
    if not is_write(node.target):
        return []
    given = list(written_arguments(node.target, node.args, node.kwargs))
    return [each for each in pytree.tree_leaves(given) if isinstance(each, fx.Node)]


def _base_of_view(node: fx.Node) -> fx.Node:
    """Return the node in whose memory a node may lie."""
    while True:
        target = node.target
        if target is operator.getitem:
            viewed: Any = node.args[0]
        elif not isinstance(target, torch._ops.OpOverload) or not node.args:
            return node
        else:
            schema = target._schema
            is_view = any(each.alias_info is not None for each in schema.returns)
            if not is_view and schema.name.partition("::")[2] not in MAY_ALIAS:
                return node
            viewed = node.args[0]
        if not isinstance(viewed, fx.Node):
            return node
        node = viewed
