"""Seconds and bytes of one operation on one device, from its rule and its local shapes.

    seconds = max(FLOPs / peak FLOP/s, bytes / bandwidth) + latency      (roofline, Williams et al. 2009)

where the bandwidth is that of products of few rows for contractions, which read what they need once, and for other
operations that of elementwise ones (a CPU computes tanh, and multiplies a few rows, more slowly than it reads; a GPU's
memory bounds all of them), and the peak is what large matmuls reach of it by the hardware's `product_efficiency`, of
which fused attention reaches the share that the hardware states, FLOPs being counted as in `product_efficiency`, which
says what is lost to small shapes; forward once, backward as `backward_share` says: a matmul has one
matmul for each input that needs a gradient. A tensor of several uses has its gradients summed.
The rule of a call, or the implementation that runs it, states its moved bytes and its efficiency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.costs.hardware.profile import Hardware
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.operation import ATEN, Call, Implementation, LocalSizes, OpRule, is_product, is_view
from autopar.ir.sharding.rule import BoundRule, Rule

NOT_LINEAR = 1.5
"""Work of the backward of a function that is not linear, over its forward."""
GRADIENTS_MOVED = 3
"""Gradients that are read and written to sum two."""
NO_SIZES: LocalSizes = {}
"""The sizes of a call that the ATen call runs, which reads none."""
LINEAR, ADDED = "~", "+"
"""Marks of inputs in a rule."""


def larger(one: float, other: float) -> float:
    """Return the larger of two amounts; if one has symbols, the function `Max` of both (see `views.formulas`)."""
    of_symbols = getattr(one, "larger", None) or getattr(other, "larger", None)
    return of_symbols(one, other) if of_symbols else max(one, other)


def smaller(one: float, other: float) -> float:
    """Return the smaller of two amounts; if one has symbols, the function `Min` of both."""
    of_symbols = getattr(one, "smaller", None) or getattr(other, "smaller", None)
    return of_symbols(one, other) if of_symbols else min(one, other)


def flops(call: Call, op: OpRule, bound: BoundRule) -> int:
    """Return floating point operations of the whole forward call: 2 × product of the factors of a contraction."""
    if op.flops is not None:
        return op.flops
    if is_product(op, bound):
        return 2 * math.prod(bound.sizes.values())
    return sum(output.num_elements for output in call.outputs)


def bandwidth(op: OpRule, bound: BoundRule, hardware: Hardware) -> float:
    """Return the bytes per second at which a call goes through its inputs and outputs."""
    return hardware.product_bytes_per_s if is_product(op, bound) else hardware.elementwise_bytes_per_s


def peak_flops(call: Call, op: OpRule, hardware: Hardware, implementation: Implementation = ATEN) -> float:
    """Return the FLOP/s that a call may reach, by the ATen call or by an implementation."""
    peak = hardware.flops_of(_computed_in(call, op))
    reached = implementation.efficiency or op.efficiency
    share = hardware.attention_efficiency if reached != "matmul" else 1.0
    return peak * hardware.product_efficiency * share


def _computed_in(call: Call, op: OpRule) -> torch.dtype:
    """Return the dtype of what a call gives; where its rule states FLOPs, of what it multiplies: a loss may be
    wider.
    """
    first = [*(call.inputs if op.flops is not None else ()), *call.outputs]
    return first[0].dtype if first else torch.float32


def local_elements(info: TensorInfo, layout: Layout, sizes: Sequence[int]) -> int:
    return math.prod(layout.local_shape(info.shape, sizes))


@dataclass(frozen=True, slots=True)
class ForwardTerms:
    """Terms of a forward's seconds on one device: max(FLOPs / peak, moved / bandwidth) + Σ amount / rate.

    Amounts may have symbols: seconds are then a formula.
    """

    peak: float
    """FLOP/s."""
    moved_bytes: int
    bytes_per_s: float
    more: tuple[tuple[int, float], ...] = ()
    """(amount, rate) of what takes time of its own."""

    def seconds(self, num_flops: float) -> float:
        """Return the seconds, without the latency, of so many FLOPs at the full rate."""
        found = larger(num_flops / self.peak, self.moved_bytes / self.bytes_per_s)
        return found + sum(amount / rate for amount, rate in self.more)


def forward_terms(
    call: Call,
    op: OpRule,
    num_bytes: tuple[int, int],
    hardware: Hardware,
    bytes_per_s: float,
    implementation: Implementation = ATEN,
    local: LocalSizes = NO_SIZES,
) -> ForwardTerms:
    """Return the terms of a call that reads and writes `num_bytes` on a device; `local` are its sizes of factors.

    What the call reads and writes in elementwise operations other than its products takes time of its own; it is left
    out where no sizes are given.
    """
    elementwise = implementation.elementwise_bytes(op, call, local) if local else 0
    more = ((elementwise, hardware.elementwise_bytes_per_s),) if elementwise else ()
    moved = implementation.moved_bytes(op, call, local, *num_bytes)
    return ForwardTerms(peak_flops(call, op, hardware, implementation), moved, bytes_per_s, more)


def forward_seconds(
    call: Call,
    op: OpRule,
    num_flops: float,
    layouts: tuple[Sequence[Layout], Sequence[Layout]],
    sizes: Sequence[int],
    hardware: Hardware,
    bytes_per_s: float,
    implementation: Implementation = ATEN,
    local: LocalSizes = NO_SIZES,
) -> float:
    """Return the seconds of the forward of a call that takes each device as long as `num_flops` at its full rate (see
    `product_efficiency`), or as its bytes (see `bandwidth`).

    `local` are the sizes of factors that the implementation reads.
    """
    if is_view(call):
        return 0.0
    read, written = (
        sum(
            local_elements(info, layout, sizes) * info.dtype.itemsize for info, layout in zip(infos, given, strict=True)
        )
        for infos, given in zip((call.inputs, call.outputs), layouts, strict=True)
    )
    terms = forward_terms(call, op, (read, written), hardware, bytes_per_s, implementation, local)
    return terms.seconds(num_flops) + hardware.op_latency_s


def backward_share(call: Call, op: OpRule) -> float:
    """Return the work of the backward over that of the forward: as stated, or the sum over inputs."""
    if op.backward is not None:
        return op.backward if _needed(call) else 0
    return sum(backward_shares(call, op))


def backward_shares(call: Call, op: OpRule) -> tuple[float, ...]:
    """Return the work of the backward for the gradient of each input, over that of the forward.

    A product has one product per input; an input that is added to it has a sum in their place. A sum passes its
    gradient on, unless an input was broadcast. A function of one input that is not linear reads its input again: it
    moves three tensors where the forward moves two. Work that a rule states is divided evenly.
    """
    needed = [each.requires_grad for each in call.inputs]
    marks = _marks(op, len(call.inputs))
    if op.backward is not None:
        return tuple(each * op.backward / max(sum(needed), 1) for each in needed)
    if marks.count(LINEAR) > 1:
        return tuple(each and mark != ADDED for each, mark in zip(needed, marks, strict=True))
    if ADDED in marks and LINEAR not in marks:
        elements = call.outputs[0].num_elements
        return tuple(each and own.num_elements < elements for each, own in zip(needed, call.inputs, strict=True))
    if marks == ("",) and op.flops is None:
        return tuple(each * NOT_LINEAR for each in needed)
    return tuple(needed)


def backward_launches(call: Call, op: OpRule) -> int:
    """Count the operations that the backward starts: one per input that needs a gradient, or as the rule states."""
    needed = _needed(call)
    return math.ceil(op.backward) if needed and op.backward is not None else needed


def gradient_sum_seconds(info: TensorInfo, layout: Layout, sizes: Sequence[int], hardware: Hardware) -> float:
    """Return the seconds that add the gradient of one use of a tensor to that of its later uses."""
    num_bytes = local_elements(info, layout, sizes) * info.dtype.itemsize
    return GRADIENTS_MOVED * num_bytes / hardware.elementwise_bytes_per_s + hardware.op_latency_s


def _needed(call: Call) -> int:
    """Count the inputs that need a gradient, if one comes back at all."""
    return sum(info.requires_grad for info in call.inputs) if any(o.requires_grad for o in call.outputs) else 0


@functools.lru_cache(maxsize=4096)
def _marks(op: OpRule, num_inputs: int) -> tuple[str, ...]:
    return tuple(term.mark for term in Rule.parse(op.rule).inputs) if op.rule else ("?",) * num_inputs


def hidden_share(implementation: Implementation, hardware: Hardware, call: Call, local: LocalSizes) -> float:
    """Return the share of an implementation's own collectives that pass while it computes, if it computes as long.

    A running collective takes its `communication_share` of the device from what is computed.
    """
    share = implementation.hidden_share(call, local)
    assert 0 <= share <= 1, f"{implementation.function} hides {share} of its collectives"
    return share * (1 - hardware.communication_share)
