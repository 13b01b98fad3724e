"""A tensor as the ranks of one mesh axis hold it: split by a placement, joined again and compared with the whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from autopar.ir.sharding.layout import P, Placement

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-2}

Parts = list[Tensor]
"""One value per rank."""


def split(x: Tensor, placement: Placement, num_ranks: int) -> Parts:
    """Return the value of each rank."""
    if placement.is_split:
        return list(x.detach().chunk(num_ranks, placement.dim))
    if placement is not P:
        return [x.detach()] * num_ranks
    if x.is_floating_point() or x.is_complex():
        parts = [torch.randn_like(x) for _ in range(num_ranks - 1)]
    else:
        parts = [torch.randint_like(x, -9, 9) for _ in range(num_ranks - 1)]
    return [*parts, x.detach() - sum(parts)]


def value_fault(parts: Parts, placement: Placement, expected: Tensor, tolerance: float = 1e-9) -> str:
    """Return how the parts, joined by the placement, differ from the expected tensor; "" if they do not."""
    local = local_shape(expected, placement, len(parts))
    if any(tuple(part.shape) != local for part in parts):
        return f"has local shape {list(parts[0].shape)}, not {list(local)}"
    if placement.is_split:
        same = _is_close(torch.cat(parts, placement.dim), expected, tolerance)
        return "" if same else f"is not the concatenation in dim {placement.dim}"
    if placement is P:
        same = _is_close(torch.stack(parts).sum(0).to(expected.dtype), expected, tolerance)
        return "" if same else "is not the sum over the ranks"
    same = all(_is_close(part, expected, tolerance) for part in parts)
    return "" if same else "is not the same as the whole on every rank"


def local_shape(x: Tensor, placement: Placement, num_ranks: int) -> tuple[int, ...]:
    """Return the shape of one rank's part, where the split dim divides."""
    return tuple(
        size // num_ranks if placement.is_split and d == placement.dim else size for d, size in enumerate(x.shape)
    )


def tolerance_of(tensors: Iterable[Tensor]) -> float:
    """Return the error, relative or absolute, that the coarsest of the types allows; relative to numbers of size
    one.
    """
    return max((TOLERANCE.get(x.dtype, 1e-9) for x in tensors), default=1e-9)


def _is_close(x: Tensor, expected: Tensor, tolerance: float) -> bool:
    if x.dtype != expected.dtype or x.shape != expected.shape:
        return False
    if not x.is_floating_point() and not x.is_complex():
        return torch.equal(x, expected)
    return torch.allclose(x, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
