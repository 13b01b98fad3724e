"""Detection of tensors that may hold infinite values: a mask of -inf is ordinary, and 0 · inf is nan.

A partial tensor may be zero on all ranks but one. Its product with an infinite factor is then nan on the others, though
the product of the whole is infinite or zero. Infinite values come from outside (inputs and buffers of floating point),
from constants that hold some, and from calls that are given one. They pass through operations that move, add, multiply
or select elements. They end at a bounded function (softmax, exp of -inf, clamp) or at a sum over many values: a
model whose matmuls meet infinite values does not train on one process either.
"""

from __future__ import annotations

import functools
import math
import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.ir.program.program import Program, TensorInfo

PASSING = frozenset(
    (
        *("abs", "add", "addcmul", "cat", "clone", "contiguous", "detach", "div", "gather", "index", "index_select"),
        *("alias", "lift_fresh_copy", "masked_fill", "maximum", "minimum", "mul", "neg", "pow", "relu", "repeat"),
        *("rsub", "select_scatter", "slice_scatter", "square", "stack", "sub", "to", "tril", "triu", "where"),
        *("constant_pad_nd", "pad", "sum", "amax", "amin", "flip", "roll", "_to_copy", "concat", "index_put"),
    )
)
"""Operations, views excepted, whose outputs are infinite where an input is."""


def may_be_infinite(program: Program) -> frozenset[str]:
    """Return the names of the placeholders and calls whose floating point values may be infinite."""
    if "infinite" not in program.facts:
        program.facts["infinite"] = _may_be_infinite(program)
    return program.facts["infinite"]


def _may_be_infinite(program: Program) -> frozenset[str]:
    outside = {*filter(None, program.inputs), *program.buffers.values()} - set(program.received)
    outside |= {name for name, value in program.constants.items() if not torch.isfinite(value).all()}
    found: set[str] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in outside and _is_float(node):
                found.add(node.name)
        elif node.op == "call_function" and _is_float(node):
            passes = node.target is operator.getitem or _passes(node)
            if _given_infinity(node) or (passes and any(each.name in found for each in node.all_input_nodes)):
                found.add(node.name)
    return frozenset(found)


def _passes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and _lets_pass(node.target)


@functools.cache
def _lets_pass(operation: torch._ops.OpOverload) -> bool:
    schema = operation._schema
    is_view = any(result.alias_info is not None for result in schema.returns)
    return is_view or schema.name.partition("::")[2] in PASSING


def _given_infinity(node: fx.Node) -> bool:
    """Return whether a plain number among a call's arguments is infinite or nan, as the value of a fill may be."""
    return _passes_or_fills(node) and any(
        isinstance(leaf, float) and not math.isfinite(leaf) for leaf in pytree.tree_leaves((node.args, node.kwargs))
    )


def _passes_or_fills(node: fx.Node) -> bool:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return _passes(node) or "full" in name or "fill" in name or name == "aten::scalar_tensor"


def _is_float(node: fx.Node) -> bool:
    infos = pytree.tree_leaves(node.meta.get("tensor"))
    return any(
        isinstance(info, TensorInfo) and (info.dtype.is_floating_point or info.dtype.is_complex) for info in infos
    )
