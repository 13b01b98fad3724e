"""Seconds and bytes of one operation on one device, from its rule and its local shapes.

    seconds = max(FLOPs / peak FLOP/s, bytes / bandwidth) + latency      (roofline, Williams et al. 2009)

where the bandwidth is that of products of few rows for contractions, which read what they need once, and for other
operations that of elementwise ones (a CPU computes tanh, and multiplies a few rows, more slowly than it reads; a GPU's
memory bounds all of them), and the peak is what large matmuls reach of it by the hardware's `product_efficiency`, of
which fused attention reaches the share that the hardware states, FLOPs being counted as in `product_efficiency`, which
says what is lost to small shapes; forward once, backward once per input that needs a gradient
(a matmul has one matmul for each of them) unless its rule says otherwise, as that of fused attention.
What a call moves, and whose share of the peak it reaches, its rule says, or the implementation that runs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from autopar.hardware.profile import Hardware
from autopar.program.program import TensorInfo
from autopar.sharding.layout import Layout
from autopar.sharding.operation import Call, Implementation, LocalSizes, OpRule, is_product, is_view
from autopar.sharding.rule import BoundRule, Rule


def flops(call: Call, op: OpRule, bound: BoundRule) -> int:
    """Floating point operations of the whole forward call: 2 × product of the factors of a contraction."""
    if op.flops is not None:
        return op.flops
    if is_product(op, bound):
        return 2 * math.prod(bound.sizes.values())
    return sum(output.num_elements for output in call.outputs)


def bandwidth(op: OpRule, bound: BoundRule, hardware: Hardware) -> float:
    """The bytes per second at which a call goes through its inputs and outputs."""
    return hardware.product_bytes_per_s if is_product(op, bound) else hardware.elementwise_bytes_per_s


def peak_flops(call: Call, op: OpRule, hardware: Hardware, implementation: Implementation | None = None) -> float:
    """The FLOP/s that a call may reach, by the ATen call or by an implementation."""
    peak = hardware.flops_of(_computed_in(call, op))
    reached = (implementation and implementation.efficiency) or op.efficiency
    share = hardware.attention_efficiency if reached == "attention" else 1.0
    return peak * hardware.product_efficiency * share


def _computed_in(call: Call, op: OpRule) -> torch.dtype:
    """The dtype of what a call gives; where its rule states FLOPs, of what it multiplies: a loss may be wider."""
    first = [*(call.inputs if op.flops is not None else ()), *call.outputs]
    return first[0].dtype if first else torch.float32


def moved_bytes(op: OpRule, inputs: int, outputs: int, implementation: Implementation | None = None) -> int:
    """Bytes that a call reads and writes in its forward, from those of its inputs and of its outputs."""
    return ((implementation and implementation.moved_bytes) or op.moved_bytes)(inputs, outputs)


def local_elements(info: TensorInfo, layout: Layout, sizes: Sequence[int]) -> int:
    return math.prod(layout.local_shape(info.shape, sizes))


def forward_seconds(
    call: Call,
    op: OpRule,
    num_flops: float,
    layouts: tuple[Sequence[Layout], Sequence[Layout]],
    sizes: Sequence[int],
    hardware: Hardware,
    bytes_per_s: float,
    implementation: Implementation | None = None,
    scratch_bytes: int = 0,
    elementwise_bytes: int = 0,
) -> float:
    """Seconds of the forward of a call that takes each device as long as `num_flops` at its full rate (see
    `product_efficiency`), or as its bytes (see `bandwidth`).

    `scratch_bytes` are read and written beside inputs and outputs; what it reads and writes in elementwise operations
    beside its products takes time of its own.
    """
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
    computing = num_flops / peak_flops(call, op, hardware, implementation)
    forward = max(computing, (moved_bytes(op, inputs, outputs, implementation) + scratch_bytes) / bytes_per_s)
    return forward + elementwise_bytes / hardware.elementwise_bytes_per_s + hardware.op_latency_s


def backward_share(call: Call, op: OpRule) -> float:
    """The work of the backward over that of the forward: as much for each input that needs a gradient, or as stated.

    What is added to a product, as a bias, has a gradient that is no product, but a sum beside those.
    """
    needed = _needed(call)
    if needed and op.backward is not None:
        return op.backward
    return sum(call.inputs[position].requires_grad for position in _multiplied(op, len(call.inputs))) if needed else 0


def backward_launches(call: Call, op: OpRule) -> int:
    """How many operations the backward starts: one for each input that needs a gradient, or as the rule states."""
    needed = _needed(call)
    return math.ceil(op.backward) if needed and op.backward is not None else needed


def _needed(call: Call) -> int:
    """How many inputs need a gradient, where one comes back at all."""
    return sum(info.requires_grad for info in call.inputs) if any(o.requires_grad for o in call.outputs) else 0


@functools.lru_cache(maxsize=4096)
def _multiplied(op: OpRule, num_inputs: int) -> tuple[int, ...]:
    """The positions of inputs without those that are added to a product of others."""
    marks = [term.mark for term in Rule.parse(op.rule).inputs] if "+" in op.rule else []
    added = [n for n, mark in enumerate(marks) if mark == "+"] if marks.count("~") > 1 else []
    return tuple(n for n in range(num_inputs) if n not in added)


def hidden_share(implementation: Implementation | None, hardware: Hardware, call: Call, local: LocalSizes) -> float:
    """The share of an implementation's own collectives that pass while it computes, as far as it computes as long.

    A running collective takes its `communication_share` of the device from what is computed.
    """
    if implementation is None:
        return 0.0
    return share_beside(implementation, call, local) * (1 - hardware.communication_share)


def share_beside(implementation: Implementation, call: Call, local: LocalSizes) -> float:
    """The share of an implementation's own collectives that it issues before it computes, whatever a device hides."""
    share = implementation.hidden_share
    return share(call, local) if callable(share) else share
