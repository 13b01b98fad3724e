"""Capacity: an expert takes at most C rows of each sample, the earliest ones (GShard, Lepikhin et al. 2020).

    within_capacity(index, num_experts, capacity_factor) -> index
    C = ceil(capacity_factor · K · S / E)

Which rows are dropped follows from their sample alone: it is the same however samples are divided among devices.
Legend: B samples, S positions, K experts of a token, E experts; L = S · K slots of a sample, in the order of positions
and, of one token, of its experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def capacity(num_slots: int, num_experts: int, capacity_factor: float) -> int:
    """Return the most rows of a sample, with so many slots, that an expert takes.

    The factor counts as the decimal that it prints.

    >>> capacity(50, 5, 1.1), math.ceil(1.1 * 50 / 5)
    (11, 12)
    """
    return math.ceil(Fraction(str(capacity_factor)) * num_slots / num_experts)


def padded_rows(num_slots: int, num_blocks: int, padded: float) -> int:
    """Return the rows for which a device has room that come from one with so many slots, of `num_blocks` of experts.

    >>> padded_rows(64, 4, 1.25), padded_rows(64, 4, 8.0)
    (20, 64)
    """
    numerator, denominator = Fraction(str(padded)).as_integer_ratio()
    return min(num_slots, -(-(num_slots * numerator) // (num_blocks * denominator)))


def slots_of_sample(index: tuple[int, ...]) -> int:
    """Return the number of slots of each sample: the product of all dims of the index but the first."""
    return math.prod(index[1:])


@dataclass(slots=True)
class DroppedRows:
    """Rows that each block of experts has dropped, in the order of execution, of the samples that this rank examines.

    Every sample is examined by equally many ranks: over all of them the sum of `dropped` over that of `rows` is the
    share of the batch.
    """

    dropped: list[Tensor] = field(default_factory=list)
    """One number each, on the device of the model: to look at it is what costs time."""
    rows: list[int] = field(default_factory=list)
    """Number of rows of each block, dropped ones included."""

    @property
    def share(self) -> float:
        """Share of all rows that were dropped: 0.0 for none."""
        return sum(int(each) for each in self.dropped) / max(1, sum(self.rows))


_open: list[DroppedRows] = []


@contextlib.contextmanager
def record_dropped_rows() -> Iterator[DroppedRows]:
    """Count the rows that models with a `capacity_factor` drop inside the block.

    Calls under `torch.compile` are not seen. Put the forward alone into the block: a layer that the backward
    computes again may be counted again.

    >>> with record_dropped_rows() as found:
    ...     within = torch.ops.autopar.within_capacity(torch.tensor([[[0], [0], [0], [1]]]), 2, 1.0)
    >>> within.flatten().tolist(), found.share
    ([0, 0, 2, 1], 0.25)
    """
    found = DroppedRows()
    _open.append(found)
    try:
        yield found
    finally:
        _open.remove(found)


def _within_capacity(index: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    expert_BL = index.reshape(index.shape[0], slots_of_sample(tuple(index.shape)))
    limit = capacity(expert_BL.shape[1], num_experts, capacity_factor)
    sorted_BL, slot_BL = torch.sort(expert_BL, dim=1, stable=True)
    begin_BL = torch.searchsorted(sorted_BL, sorted_BL)
    place_BL = torch.arange(expert_BL.shape[1], device=index.device) - begin_BL
    within_BL = torch.where(place_BL < limit, sorted_BL, num_experts)
    if _open and not (torch.compiler.is_compiling() or is_fake(index) or index.is_meta):
        for each in _open:
            each.dropped.append((within_BL == num_experts).sum())
            each.rows.append(index.numel())
    return torch.empty_like(expert_BL).scatter_(1, slot_BL, within_BL).view(index.shape)


torch.library.define("autopar::within_capacity", "(Tensor index, int num_experts, float capacity_factor) -> Tensor")
torch.library.impl("autopar::within_capacity", "CompositeImplicitAutograd", _within_capacity)

WITHIN_CAPACITY: torch._ops.OpOverload = torch.ops.autopar.within_capacity.default
"""index (B, S, K) → the same, E in place of the experts that are full: such slots are dropped."""
