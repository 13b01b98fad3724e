"""How long a product takes at the full rate of a device, in FLOPs, by its shape; and attention, by its length.

A device makes an output in tiles, as many at once as it has multiprocessors: a wave of elements. The last wave is half
full on average, whatever the size, so that b products of m × k by k × n take

    2 (b·m·n + wave/2) k      of their FLOPs at the full rate, 2·b·m·n·k

where `wave` is the hardware's `product_wave`. Their backward makes outputs of m × k and of k × n; each pass is priced
at the mean of the three, which is right for all of them together:

    FLOPs + wave · (m + n + k) / 3

So few rows, narrow outputs and short sums reach little of the peak. Fused attention goes through its queries in tiles
that begin and end: it takes  FLOPs · (1 + length / queries),  `length` being the hardware's `attention_length`, at
which it reaches half of its rate.

What states its own FLOPs (a convolution, experts, a loss in tiles) is no single product, and goes at the full rate.
All of it holds for sizes with symbols, too: see `formulas`.
"""

from __future__ import annotations

import itertools
import math

from autopar.hardware.profile import Hardware
from autopar.sharding.operation import Implementation, LocalSizes, OpRule
from autopar.sharding.rule import BoundRule

SIDES = 3
Sides = tuple[tuple[str, ...], ...]
"""The factors that make the rows of a product's output, its columns, and what is summed."""
QUERIES = "s"
"""The factor of queries in the rules of attention."""


def full_rate_flops(
    num_flops: float,
    op: OpRule,
    sides: Sides,
    local: LocalSizes,
    hardware: Hardware,
    implementation: Implementation | None = None,
) -> float:
    """The FLOPs that a device makes at its full rate while a call computes `num_flops`; `local` are its own sizes."""
    if takes_longer(op, local, hardware, implementation):
        num_flops *= 1 + hardware.attention_length / local[QUERIES]
    if hardware.product_wave:
        elements = sum(math.prod(local[each] for each in side) for side in sides)
        num_flops += hardware.product_wave / SIDES * elements
    return num_flops


def sides_of(op: OpRule, bound: BoundRule) -> Sides:
    """The factors of a single product that make its rows, its columns, and what is summed; () for what is none."""
    if op.flops is not None:
        return ()
    terms = [set(term.factors) for term in bound.rule.inputs if term.mark != "+"]
    kept = {factor for term in bound.rule.outputs for factor in term.factors}
    for left, right in itertools.combinations(terms, 2):
        if left & right - kept:
            sides = (left & kept) - right, (right & kept) - left, (left & right) - kept
            return tuple(tuple(each for each in bound.rule.factors if each in side) for side in sides)
    return ()


def takes_longer(
    op: OpRule, local: LocalSizes, hardware: Hardware, implementation: Implementation | None = None
) -> bool:
    """Whether a call is attention whose queries, on a device, say how much of its rate it reaches."""
    reached = (implementation and implementation.efficiency) or op.efficiency
    return reached == "attention" and QUERIES in local and hardware.attention_length > 0
