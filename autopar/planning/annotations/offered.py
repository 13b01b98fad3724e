"""Candidate strategies of a decision, described by the roles and slices that annotations use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.costs.space.space import Decision
from autopar.ir.program.program import info_of
from autopar.ir.sharding.annotation import Slices
from autopar.ir.sharding.layout import P


def offered_roles(decision: Decision) -> np.ndarray:
    """Return the role of every strategy on every mesh axis: strings, of shape (strategies, axes)."""
    strategies = decision.candidates.strategies
    words = [[decision.role(number, axis) for axis in range(len(s.choices))] for number, s in enumerate(strategies)]
    return np.array(words, dtype=object)


def is_weighted(decision: Decision) -> bool:
    """Return whether the rule has a column or row factor, as linear, matmul, convolution and embedding do."""
    bound = decision.candidates.bound
    return bound is not None and not {"o", "k"}.isdisjoint(bound.rule.factors)


def output_shapes(decision: Decision) -> tuple[tuple[int, ...], ...]:
    """Return shapes of the tensors that a decision decides about."""
    call = decision.candidates.call
    return tuple(info.shape for info in call.outputs) if call is not None else (info_of(decision.node).shape,)


def offered_slices(decision: Decision, sizes: Sequence[int]) -> tuple[Slices | None, ...]:
    """Return the number of slices of every dim of every input, per strategy; None for those that take a partial
    input.
    """
    call = decision.candidates.call
    assert call is not None, f"{decision.name} has no inputs"

    def of(layouts: Sequence) -> Slices | None:
        if any(placement is P for layout in layouts for placement in layout):
            return None
        return tuple(
            tuple(layout.num_parts(dim, sizes) for dim in range(len(info.shape)))
            for layout, info in zip(layouts, call.inputs, strict=True)
        )

    return tuple(of(strategy.inputs) for strategy in decision.candidates.strategies)
