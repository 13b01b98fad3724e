"""Seconds and bytes of one operation on one device, from its rule and its local shapes.

    seconds = max(FLOPs / peak FLOP/s, bytes / memory bandwidth) + latency      (roofline, Williams et al. 2009)

forward once, backward once per input that needs a gradient (a matmul has one matmul for each of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.hardware import Hardware
from autopar.layout import Layout
from autopar.operation import Call, OpRule, is_view
from autopar.optimizers import Optimizer
from autopar.program import TensorInfo
from autopar.rule import BoundRule


def base_name(call: Call) -> str:
    """The operation's name without namespace and overload: "linear"."""
    target = call.target
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else str(target)


def is_contraction(bound: BoundRule) -> bool:
    """Whether the rule multiplies two tensors and sums a factor away."""
    factors = [set(term.factors) for term in bound.rule.inputs if term.mark != "+"]
    kept = {factor for term in bound.rule.outputs for factor in term.factors}
    return any(left & right - kept for i, left in enumerate(factors) for right in factors[i + 1 :])


def flops(call: Call, op: OpRule, bound: BoundRule) -> float:
    """Floating point operations of the whole forward call: 2 × product of the factors of a contraction."""
    if op.flops is not None:
        return float(op.flops)
    if is_contraction(bound) and base_name(call) != "embedding":
        return 2.0 * math.prod(bound.sizes.values())
    return float(sum(output.num_elements for output in call.outputs))


def local_elements(info: TensorInfo, layout: Layout, sizes: Sequence[int]) -> int:
    return math.prod(layout.local_shape(info.shape, sizes))


def forward_seconds(
    call: Call,
    total_flops: float,
    share: float,
    layouts: tuple[Sequence[Layout], Sequence[Layout]],
    sizes: Sequence[int],
    hardware: Hardware,
) -> float:
    """Seconds of the forward of a call that computes `share` of its FLOPs on each device."""
    if is_view(call):
        return 0.0
    inputs = sum(
        local_elements(info, layout, sizes) * info.dtype.itemsize
        for info, layout in zip(call.inputs, layouts[0], strict=True)
    )
    outputs = sum(
        local_elements(info, layout, sizes) * info.dtype.itemsize
        for info, layout in zip(call.outputs, layouts[1], strict=True)
    )
    if base_name(call) == "embedding":
        inputs = outputs  # a lookup reads the rows it needs, not the table
    dtype = call.outputs[0].dtype if call.outputs else torch.float32
    forward = max(total_flops * share / hardware.flops_of(dtype), (inputs + outputs) / hardware.memory_bytes_per_s)
    return forward + hardware.op_latency_s


def num_backward(call: Call) -> int:
    """How often the backward computes as much as the forward: once per input that needs a gradient."""
    return sum(info.requires_grad for info in call.inputs) if any(o.requires_grad for o in call.outputs) else 0


def optimizer_seconds(
    info: TensorInfo, layout: Layout, sizes: Sequence[int], hardware: Hardware, optimizer: Optimizer
) -> float:
    """Seconds of the optimizer's step of a parameter in its storage layout: bound by memory bandwidth."""
    each = optimizer.step_bytes(info)
    if not each:
        return 0.0
    return local_elements(info, layout, sizes) * each / hardware.memory_bytes_per_s + hardware.op_latency_s
