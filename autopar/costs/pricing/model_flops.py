"""The model FLOPs of a step, and the samples and tokens of its batch, from the captured program.

Counted are products (matrix products, convolutions, attention, experts), forward and backward: in the backward as much
for each operand that needs a gradient, or as a rule says. Recomputation is not counted, as in MFU (PaLM, appendix B),
nor are biases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from autopar.costs.pricing.operations import backward_share, flops
from autopar.ir.program.program import Program, TensorInfo
from autopar.strategies.roles import RoledCall, RoledProgram


def model_flops(program: Program) -> Mapping[torch.dtype, float]:
    """Map each dtype of products to their FLOPs in one forward, plus one backward if the program trains."""
    found: Counter[torch.dtype] = Counter()
    for each in RoledProgram.of(program).calls.values():
        operands = _operands(each)
        if each.op.flops is None and len(operands) < 2:
            continue
        stated = each.op.backward is not None or len(operands) < 2
        share = backward_share(each.call, each.op) if stated else sum(info.requires_grad for info in operands)
        count = flops(each.call, each.op, each.bound) * (1 + share * program.training)
        found[each.call.inputs[0].dtype] += count  # type: ignore[assignment]
    return dict(found)


def _operands(each: RoledCall) -> list[TensorInfo]:
    """Return the operands that a call multiplies and sums.

    These are the floating-point inputs with a factor that is absent from the outputs. A call whose outputs have no
    factor, such as a loss, has none.
    """
    kept = {factor for term in each.out_terms for factor in term.factors}
    if not kept:
        return []
    inputs = zip(each.in_terms, each.call.inputs, strict=True)
    return [
        info for term, info in inputs if info.dtype.is_floating_point and term.mark != "+" and {*term.factors} - kept
    ]


def batch_of(program: Program) -> tuple[int, int | None]:
    """Return the batch size and its tokens: elements of the first integer input with two dims or more."""
    tensors = [value for value in program.input_values if isinstance(value, TensorInfo) and value.shape]
    tokens = (x.num_elements for x in tensors if len(x.shape) > 1 and not x.dtype.is_floating_point)
    return (tensors[0].shape[0] if tensors else 1), next(tokens, None)
