"""Kinds of nodes of a program: a call, a `getitem` of a call's outputs, a cast."""

from __future__ import annotations

import operator

import torch
from torch import fx


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the call or placeholder that makes a tensor, and which of its outputs (without the absent ones) it is."""
    if node.op == "call_function" and node.target is operator.getitem:
        parent, position = node.args
        assert isinstance(parent, fx.Node) and isinstance(position, int)
        infos = parent.meta["tensor"]
        return parent, sum(info is not None for info in infos[:position])
    return node, 0


def is_cast(node: fx.Node) -> bool:
    """Return whether a call only changes the dtype of a tensor."""
    return node.target in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


def is_call(node: fx.Node) -> bool:
    """Return whether a node is a decision of its own: a call other than `getitem`."""
    return node.op == "call_function" and node.target is not operator.getitem


def module_of(node: fx.Node) -> str:
    """Return the path of the module that makes a call, "" for the root."""
    return str(node.meta.get("module", ""))
