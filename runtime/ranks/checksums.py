"""Numbers that tell the values of tensors, to see whether ranks hold the same ones.

Checksums of inputs are sums of bits: exact and alike on every device. Gradients may differ by rounding where ranks
compute the same; they are told by projections onto random signs, which are compared within a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integers with the same bits."""
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd, as int64: spreads the numbers of rows
NUM_PROJECTIONS = 4
SAME_SIGNS = 7  # seed
TOLERANCE = 2.0
"""Tolerance of projections of equal gradients, in square roots of the machine epsilon, relative to the norm."""

Projections = list[float]
"""The allowed difference, and the dot products with random signs."""


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the name → a number that tells the values of a tensor, and which row and column has which; waits for the
    device.
    """
    known = {name: each.detach() for name, each in tensors.items() if not each.is_meta and each.layout == torch.strided}
    found = {name: _checksum(tensor) for name, tensor in known.items()}
    return {name: int(value.item()) for name, value in found.items()}


def _checksum(tensor: Tensor) -> Tensor:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = values.contiguous().view(INTEGERS[values.element_size()])
    table = bits.flatten(1) if bits.ndim > 1 else bits.reshape(-1, 1)
    return _weighted(table.sum(1, dtype=torch.int64)) - 3 * _weighted(table.sum(0, dtype=torch.int64))


def _weighted(sums: Tensor) -> Tensor:
    """Return a sum modulo 2^64 that changes when entries change places."""
    weights = (torch.arange(1, len(sums) + 1, device=sums.device) * MULTIPLIER) ^ 0x5DEECE66D
    return (sums * weights).sum()


def projections(tensor: Tensor) -> Projections:
    """Return numbers that tell the values of a gradient up to rounding; waits for the device.

    Two different gradients of norm g agree in all of them with probability about (tolerance / g) ** NUM_PROJECTIONS.
    """
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    table = values.flatten(1) if values.ndim > 1 else values.reshape(-1, 1)
    random = torch.Generator().manual_seed(SAME_SIGNS)
    rows, columns = (
        torch.randint(0, 2, (size, NUM_PROJECTIONS), generator=random).mul_(2).sub_(1).to(table) for size in table.shape
    )
    products = ((table @ columns).double() * rows).sum(0)
    norm = torch.linalg.vector_norm(table, dtype=torch.float64)
    tolerance, *found = torch.cat([norm.reshape(1), products]).tolist()
    return [tolerance * TOLERANCE * math.sqrt(torch.finfo(table.dtype).eps), *found]


def are_close(one: int | Projections, other: Any) -> bool:
    """Return whether checksums are equal, or projections close; those of gradients that are not finite always are."""
    if isinstance(one, int) or not isinstance(other, list):
        return one == other
    finite = [all(map(math.isfinite, each)) for each in (one, other)]
    if not all(finite):
        return not any(finite)
    return all(abs(a - b) <= max(one[0], other[0]) for a, b in zip(one[1:], other[1:], strict=True))
