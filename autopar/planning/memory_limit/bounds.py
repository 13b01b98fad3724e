"""Bound all plans under pins within a memory limit from below, without a search.

At the prices of memory of a known plan, one evaluation of the Lagrangian L(λ) bounds the seconds of every plan under
other pins. Prices of two plans of one model are close, so that the bound is close, too.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from autopar.costs.memory.moments import MemoryRow, PricedMemory
from autopar.costs.space.narrowed import Pins
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.planning.formulation import Formulation
from autopar.planning.memory_limit.least_peak import least_peak
from autopar.planning.memory_limit.refusal import Modes
from autopar.solver.infeasibility import describe_conflict
from autopar.solver.oracles import lower_bound


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of all plans."""

    seconds: float
    """One micro-batch's share of a step; -inf if the graph's treewidth is too high or the time too short."""
    num_bytes: int
    """Peak bytes per device, as far as a short search proves; 0 if the time is too short for that."""


def bounds_at(
    formulation: Formulation, pins: Pins, limit: int, modes: Modes | None, priced: PricedMemory | None, deadline: float
) -> Bounds:
    """Return the bounds of all plans under pins that keep to the limit (bytes per device).

    `priced` None stands for memory at no price where the backward begins. Raises InfeasibleError if the pins leave a
    decision no strategy.
    """
    last = len(formulation.memory.lifetimes.calls) - 1
    if last < 0:
        return Bounds(-math.inf, 0)
    row, price = (priced.row, priced.price) if priced is not None else (MemoryRow(((last, 1),)), 0.0)
    problem, seconds, num_bytes = formulation.problem(pins, row, limit, modes), -math.inf, 0
    if problem.forbidden_node is not None:
        raise InfeasibleError(describe_conflict(problem, deadline))
    with suppress(TimeLimitError):
        seconds = lower_bound(problem, price, deadline)
    with suppress(TimeLimitError):
        num_bytes = least_peak(formulation, pins, modes, deadline, sufficient=limit, is_brief=True).bound
    return Bounds(seconds, num_bytes)
