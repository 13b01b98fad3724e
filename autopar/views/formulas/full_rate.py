"""The FLOPs of `costs.pricing.product_efficiency`, of sizes with symbols: text that sympy reads."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.product_efficiency import (
    QUERIES,
    SIDES,
    attention_length,
    is_attention,
    sides_of,
    unaligned_share,
)
from autopar.ir.sharding.operation import ATEN, Implementation, OpRule
from autopar.ir.sharding.rule import BoundRule
from autopar.views.formulas.symbols import Polynomial, Size


def full_rate_formula(
    flops: Polynomial,
    op: OpRule,
    bound: BoundRule,
    local: Mapping[str, int],
    hardware: Hardware,
    chosen: Implementation = ATEN,
) -> str:
    """Return the FLOPs that a device makes at its full rate while a call computes `flops`; `local` are its local sizes.

    Rows of products are assumed to be as aligned as at the sizes of the plan.
    """
    found = str(flops)
    if is_attention(op, chosen):
        length = attention_length(op, hardware)
        if length and QUERIES in local:
            found = f"({found})*(1 + {length!r}/({Size.of(local[QUERIES]).polynomial}))"
        if op.head_size and hardware.attention_head:
            found = f"({found})*(1 + {hardware.attention_head!r}/({Size.of(op.head_size).polynomial}))"
    sides = sides_of(op, bound)
    if sides and hardware.product_wave:
        elements = Polynomial.sum(Size.of(math.prod(local[each] for each in side)).polynomial for side in sides[:SIDES])
        found = f"{found} + {hardware.product_wave / SIDES!r}*({elements})"
    share = unaligned_share(sides, local, hardware)
    return found if share == 1 else f"({found})/{share!r}"
