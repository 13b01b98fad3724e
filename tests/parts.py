"""A tensor as the ranks of one mesh axis hold it: split by a placement, and compared with the whole when joined again."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.layout import P, Placement, S

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}

Parts = list[Tensor]
"""One value per rank."""


def split(x: Tensor, placement: Placement, num_ranks: int) -> Parts:
    """The value of each rank."""
    if placement.is_split:
        return list(x.detach().chunk(num_ranks, placement.dim))
    if placement is not P:
        return [x.detach()] * num_ranks
    if x.is_floating_point():
        parts = [torch.randn_like(x) for _ in range(num_ranks - 1)]
    else:
        parts = [torch.randint_like(x, -9, 9) for _ in range(num_ranks - 1)]
    return [*parts, x.detach() - sum(parts)]


def value_fault(parts: Parts, placement: Placement, expected: Tensor) -> str:
    """How the parts, joined by the placement, differ from what is expected; empty if they do not."""
    if placement.is_split:
        local = local_shape(expected, placement, len(parts))
        if any(tuple(part.shape) != local for part in parts):
            return f"has local shape {list(parts[0].shape)}, not {list(local)}"
        return (
            ""
            if _same(torch.cat(parts, placement.dim), expected)
            else f"is not the concatenation in dim {placement.dim}"
        )
    if any(part.shape != expected.shape for part in parts):
        return f"has local shape {list(parts[0].shape)}, not {list(expected.shape)}"
    if placement is P:
        return "" if _same(torch.stack(parts).sum(0).to(expected.dtype), expected) else "is not the sum over the ranks"
    return "" if all(_same(part, expected) for part in parts) else "is not the same as the whole on every rank"


def local_shape(x: Tensor, placement: Placement, num_ranks: int) -> tuple[int, ...]:
    """The shape of one rank's part, where the split dim divides."""
    return tuple(
        size // num_ranks if placement.is_split and d == placement.dim else size for d, size in enumerate(x.shape)
    )


def splits_of(x: Tensor, num_ranks: int) -> tuple[Placement, ...]:
    """The placements that split a dim of `x` evenly."""
    return tuple(S(dim) for dim, size in enumerate(x.shape) if size and size % num_ranks == 0)


def _same(x: Tensor, expected: Tensor) -> bool:
    if x.dtype != expected.dtype or x.shape != expected.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, expected)
    tolerance = TOLERANCE[x.dtype]
    return torch.allclose(x, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
