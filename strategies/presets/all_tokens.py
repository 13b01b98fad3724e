"""Experts that see all tokens, dense ones without a capacity, as Llama 4's: tokens are expanded over experts.

    expand     x (T, D) → (E, T, D)
    ...        gates, products by experts
    sum        (E, T, D) → (T, D)

A rank with some of the experts gathers all tokens, and sums what it makes of them: 2 · T · D numbers forward, where
rows that travel would be E · T · D / n at each end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from autopar.strategies.roles import EXPERT, RoledCall, RoledProgram, Value


def experts_of_all_tokens(graph: RoledProgram) -> Mapping[str, str]:
    """Call → the factor of experts, for the calls from an expansion of tokens over experts to their sum."""
    held: dict[Value, tuple[str, int]] = {}
    factors: dict[str, dict[str, str]] = defaultdict(dict)
    """Expansion → the calls that keep or sum the dim that it has made, each with its factor."""
    by_experts: set[str] = set()
    for call in graph.learned:
        found = _expanded(call) or next(
            (
                (held[value][0], term.dims[held[value][1]][0])
                for value, term in zip(call.inputs, call.in_terms, strict=True)
                if value in held
            ),
            None,
        )
        if call.weight_only or found is None or found[1] not in call.ruled.splittable:
            continue
        origin, factor = found
        factors[origin][call.name] = factor
        if call.roles.get(factor) == EXPERT:
            by_experts.add(origin)
        for output, term in enumerate(call.out_terms):
            dim = term.dim_of(factor)
            if dim is not None:
                held[call.name, output] = (origin, dim)
    return {name: factor for origin in by_experts for name, factor in factors[origin].items()}


def _expanded(call: RoledCall) -> tuple[str, str] | None:
    """The call itself, and the factor of a dim that it makes."""
    if call.call.target is not torch.ops.aten.expand.default:
        return None
    made = [factor for factor in call.out_terms[0].factors if factor not in call.in_terms[0].factors]
    return (call.name, made[0]) if made else None
