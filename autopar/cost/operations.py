"""Seconds and bytes of one operation on one device, from its rule and its local shapes.

    seconds = max(FLOPs / peak FLOP/s, bytes / bandwidth) + latency      (roofline, Williams et al. 2009)

where the bandwidth is that of products of few rows for contractions, which read what they need once, and for other
operations that of elementwise ones (a CPU computes tanh, and multiplies a few rows, more slowly than it reads; a GPU's
memory bounds all of them), and the peak is that of matmuls, of which fused attention reaches the share that the
hardware states; forward once, backward once per input that needs a gradient (a matmul has one matmul for each of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.cost.optimizer import Optimizer
from autopar.hardware.profile import Hardware
from autopar.program.program import TensorInfo
from autopar.sharding.layout import Layout
from autopar.sharding.operation import Call, OpRule, is_view
from autopar.sharding.rule import BoundRule


def base_name(call: Call) -> str:
    """The operation's name without namespace and overload: "linear"."""
    target = call.target
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else str(target)


def is_contraction(bound: BoundRule) -> bool:
    """Whether the rule multiplies two tensors and sums a factor away."""
    factors = [set(term.factors) for term in bound.rule.inputs if term.mark != "+"]
    kept = {factor for term in bound.rule.outputs for factor in term.factors}
    return any(left & right - kept for i, left in enumerate(factors) for right in factors[i + 1 :])


def computes_products(call: Call, op: OpRule | None, bound: BoundRule) -> bool:
    """Whether the call multiplies and sums, as matmuls, convolutions and attention do; a lookup only reads."""
    return (op is not None and op.flops is not None) or (is_contraction(bound) and base_name(call) != "embedding")


def flops(call: Call, op: OpRule | None, bound: BoundRule) -> int:
    """Floating point operations of the whole forward call: 2 × product of the factors of a contraction."""
    if op is not None and op.flops is not None:
        return op.flops
    if computes_products(call, op, bound):
        return 2 * math.prod(bound.sizes.values())
    return sum(output.num_elements for output in call.outputs)


def bandwidth(call: Call, op: OpRule | None, bound: BoundRule, hardware: Hardware) -> float:
    """The bytes per second at which a call goes through its inputs and outputs."""
    dense = computes_products(call, op, bound)
    return hardware.product_bytes_per_s if dense else hardware.elementwise_bytes_per_s


def peak_flops(call: Call, hardware: Hardware) -> float:
    """The FLOP/s that a call may reach."""
    peak = hardware.flops_of(call.outputs[0].dtype if call.outputs else torch.float32)
    return peak * hardware.attention_efficiency if base_name(call) == "scaled_dot_product_attention" else peak


def local_elements(info: TensorInfo, layout: Layout, sizes: Sequence[int]) -> int:
    return math.prod(layout.local_shape(info.shape, sizes))


def forward_seconds(
    call: Call,
    total_flops: float,
    share: float,
    layouts: tuple[Sequence[Layout], Sequence[Layout]],
    sizes: Sequence[int],
    hardware: Hardware,
    bytes_per_s: float,
) -> float:
    """Seconds of the forward of a call that computes `share` of its FLOPs on each device; see `bandwidth`."""
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
    computing = total_flops * share / peak_flops(call, hardware)
    forward = max(computing, moved_bytes(call, inputs, outputs) / bytes_per_s)
    return forward + hardware.op_latency_s


def moved_bytes(call: Call, inputs: int, outputs: int) -> int:
    """Bytes that a call reads and writes in its forward, from those of its inputs and of its outputs."""
    if base_name(call) == "embedding":
        return outputs + outputs  # a lookup reads the rows it needs, not the table
    if base_name(call) == "cross_entropy_loss":
        return inputs + inputs + outputs  # probabilities as large as the logits are written for the backward
    return inputs + outputs


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
