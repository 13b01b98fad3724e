"""The FLOPs of `costs.pricing.product_efficiency`, of sizes with symbols, and the seconds of whole calls: text that
sympy reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing import operations
from autopar.costs.pricing.product_efficiency import (
    QUERIES,
    SIDES,
    attention_length,
    is_attention,
    sides_of,
    unaligned_share,
)
from autopar.costs.space.call_candidates import Candidates
from autopar.ir.sharding.operation import ATEN, Call, Implementation, OpRule, is_view
from autopar.ir.sharding.rule import BoundRule
from autopar.strategies import rule_of
from autopar.views.formulas.sums import Sum
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


def seconds_formula(terms: operations.ForwardTerms, computing: str) -> str:
    """Return `ForwardTerms.seconds` in symbols, given those of the FLOPs at the full rate."""
    text = f"Max(({computing})/{terms.peak!r}, ({Size.of(terms.moved_bytes).polynomial})/{terms.bytes_per_s!r})"
    more = [f"({Size.of(amount).polynomial})/{per_second!r}" for amount, per_second in terms.more]
    return f"({' + '.join((text, *more))})" if more else text


def alone_formula(call: Call, bound: BoundRule, hardware: Hardware) -> str:
    """Return the seconds of the forward of a whole call on one device, without the latency; "" for a view."""
    if is_view(call):
        return ""
    bound, op = bound_again(call, bound)
    read, written = (
        sum(Size.of(i.num_elements) * i.dtype.itemsize for i in infos) for infos in (call.inputs, call.outputs)
    )
    flops = Size.of(operations.flops(call, op, bound)).polynomial
    terms = operations.forward_terms(
        call, op, (read, written), hardware, float(operations.bandwidth(op, bound, hardware))
    )
    return seconds_formula(terms, full_rate_formula(flops, op, bound, bound.sizes, hardware))


def passes_formula(calls: Iterable[tuple[Call, Candidates]], num_devices: int, hardware: Hardware) -> tuple[str, str]:
    """Return the seconds of the forward, and of the backward, of calls of which each device computes a part."""
    found = Sum(), Sum()
    for call, candidates in calls:
        assert candidates.call is not None and candidates.op is not None and candidates.bound is not None
        alone = alone_formula(call, candidates.bound, hardware)
        passes = 1, Fraction(operations.backward_share(candidates.call, candidates.op))
        for total, times in zip(found, passes, strict=True):
            if alone:
                total.add(Polynomial.of(1) * times * (1 / num_devices), alone)
                total.add(Polynomial.of(1) * times * hardware.op_latency_s)
    return str(found[0]), str(found[1])


def bound_again(call: Call, bound: BoundRule) -> tuple[BoundRule, OpRule]:
    """Return the rule of a call whose sizes are symbols, and the operation's."""
    bound = bound.rule.bind([info.shape for info in call.inputs], [info.shape for info in call.outputs])
    return bound, rule_of(call) or OpRule(str(bound.rule))
