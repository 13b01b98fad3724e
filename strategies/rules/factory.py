"""Tensors made from nothing: constants may be made in parts, sequences of numbers are made whole.

If a tensor only lends its shape or dtype, any placement would do; the output's is required.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, all_whole, names, pointwise, rule, term

aten = torch.ops.aten


def constant(call: Call) -> OpRule:
    """The same number everywhere, in a stated shape."""
    return OpRule(f" -> {term(names(len(call.outputs[0].shape)))}", shape_argument=0)


def new(call: Call) -> OpRule:
    """Return the rule of a `constant` with the dtype of a given tensor.

    Dims of the given tensor are split along with the output's dims at the same positions, if their sizes are equal.
    """
    output = call.outputs[0].shape
    dims = names(len(output))
    given = call.inputs[0].shape
    shared = [dims[i] if i < len(dims) and size == output[i] else WHOLE for i, size in enumerate(given)]
    return OpRule(rule([term(shared)], [term(dims)]), shape_argument=1)


_LIKE: Callable[[Call], str] = pointwise()

RULES: dict[torch._ops.OpOverload, Entry] = {
    **dict.fromkeys((aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format), constant),
    **dict.fromkeys(
        (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default), new
    ),
    **dict.fromkeys((aten.ones_like.default, aten.full_like.default, aten.empty_like.default), _LIKE),
    aten.zeros_like.default: pointwise(self="~"),
    **dict.fromkeys(
        (
            aten.arange.default,
            aten.arange.start,
            aten.arange.start_step,
            aten.eye.default,
            aten.eye.m,
            aten.linspace.default,
            aten.scalar_tensor.default,
        ),
        all_whole,
    ),
}
