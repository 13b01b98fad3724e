"""Time of a matrix product at the full rate of a device, in FLOPs, by its shape; and of attention, by its length.

A device makes an output in tiles, as many at once as it has multiprocessors: a wave of elements. The last wave is half
full on average, whatever the size, so that b products of m × k by k × n take

    2 (b·m·n + wave/2) k      of their FLOPs at the full rate, 2·b·m·n·k

where `wave` is the hardware's `product_wave`. Their backward makes outputs of m × k and of k × n. Each pass is priced
at the mean of the three, which is right for all of them together:

    FLOPs + wave · (m + n + k) / 3

Few rows, narrow outputs and short sums therefore reach little of the peak. Batches of products whose rows are not
aligned reach the hardware's `product_unaligned` of their rate. Fused attention goes through its queries in tiles that
begin and end, and through the features of a head. It takes

    FLOPs · (1 + length / queries) · (1 + head / features)

`length` is the hardware's `attention_length`, at which attention reaches half of its rate under a causal mask. `head`
is its `attention_head`. Without a mask no tile is half full and all take equally long: the length is then
`WITHOUT_MASK` times that.

Calls that state their own FLOPs (a convolution, experts, a loss in tiles) are no single product, and run at the full
rate. All formulas also hold for symbolic sizes: see `formulas`.
"""

from __future__ import annotations

import itertools
import math

from autopar.costs.hardware.profile import Hardware
from autopar.ir.sharding.operation import ATEN, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import BoundRule

SIDES = 3
Sides = tuple[tuple[str, ...], ...]
"""The factors that make the rows of a product's output, its columns, what is summed, and what counts products."""
ROW = 8
"""Elements of 16 bytes in a dtype of two, which a device reads at once."""
QUERIES = "s"
"""The factor of queries in the rules of attention."""
WITHOUT_MASK = 0.3
"""Ratio of the attention length without a mask to that under a causal mask.

Published curves, forward and backward, rise to half of their rate at 180 queries without a mask and 495
under one on an A100, and at 195 and 540 on an H100: 0.36 (Dao-AILab/flash-attention@0251105, assets/
flash2_a100_fwd_bwd_benchmark.png and flash2_h100_fwd_bwd_benchmark.png). Their rate is 10% and 3% higher without a
mask, which the profile's is not: 0.3 stands for both.
"""


def full_rate_flops(
    num_flops: float,
    op: OpRule,
    sides: Sides,
    local: LocalSizes,
    hardware: Hardware,
    implementation: Implementation = ATEN,
) -> float:
    """Return the FLOPs that a device makes at its full rate while a call computes `num_flops`; `local` are its own
    sizes.
    """
    if is_attention(op, implementation):
        queries, length = local.get(QUERIES, 0), attention_length(op, hardware)
        num_flops *= (queries + length) / queries if queries and length else 1.0
        num_flops *= (op.head_size + hardware.attention_head) / op.head_size if op.head_size else 1.0
    if hardware.product_wave:
        elements = sum(math.prod(local[each] for each in side) for side in sides[:SIDES])
        num_flops += elements * (hardware.product_wave / SIDES)
    return num_flops / unaligned_share(sides, local, hardware)


def unaligned_share(sides: Sides, local: LocalSizes, hardware: Hardware) -> float:
    """Return the share of its rate that a product reaches by the alignment of its rows.

    Columns and what is summed are rows of matrices in memory. Libraries have slow kernels for batches of products whose
    rows are no multiple of 16 bytes.
    """
    if not sides or not sides[-1]:
        return 1.0
    rows = (math.prod(local[each] for each in side) for side in sides[1:SIDES])
    return hardware.product_unaligned if any(row % ROW for row in rows) else 1.0


def sides_of(op: OpRule, bound: BoundRule) -> Sides:
    """Return the factors of a single product: rows, columns, what is summed, and batch; () for what is none."""
    if op.flops is not None:
        return ()
    terms = [set(term.factors) for term in bound.rule.inputs if term.mark != "+"]
    kept = {factor for term in bound.rule.outputs for factor in term.factors}
    for left, right in itertools.combinations(terms, 2):
        if left & right - kept:
            sides = (left & kept) - right, (right & kept) - left, (left & right) - kept, left & right & kept
            return tuple(tuple(each for each in bound.rule.factors if each in side) for side in sides)
    return ()


def is_attention(op: OpRule, implementation: Implementation = ATEN) -> bool:
    """Return whether a call reaches the rate of fused attention, by the ATen call or by an implementation."""
    return (implementation.efficiency or op.efficiency) != "matmul"


def attention_length(op: OpRule, hardware: Hardware) -> float:
    """Return the queries at which a call of fused attention reaches half of its rate."""
    return hardware.attention_length * (WITHOUT_MASK if op.efficiency == "attention" else 1.0)
