"""Checksums of tensors, to see whether ranks hold the same values: sums of bits, exact and alike on every device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integers with the same bits."""
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd, as int64: spreads the numbers of rows


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Name → a number that tells the values of a tensor, and which row and column has which; waits for the device."""
    known = {name: each.detach() for name, each in tensors.items() if not each.is_meta and each.layout == torch.strided}
    found = {name: _checksum(tensor) for name, tensor in known.items()}
    return {name: int(value.item()) for name, value in found.items()}


def _checksum(tensor: Tensor) -> Tensor:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = values.contiguous().view(INTEGERS[values.element_size()])
    table = bits.flatten(1) if bits.ndim > 1 else bits.reshape(-1, 1)
    return _weighted(table.sum(1, dtype=torch.int64)) - 3 * _weighted(table.sum(0, dtype=torch.int64))


def _weighted(sums: Tensor) -> Tensor:
    """A sum modulo 2^64 that changes when entries change places."""
    weights = (torch.arange(1, len(sums) + 1, device=sums.device) * MULTIPLIER) ^ 0x5DEECE66D
    return (sums * weights).sum()
