"""A number among the inputs as a tensor without dims, whose program treats it as a number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CANDIDATES = {int: (torch.int64, torch.float64), float: (torch.float64,)}
"""Type of a number → the dtypes of tensors that may stand for it, in the order in which they are tried."""
EXACT = 2**53
"""The largest integer up to which float64 has all of them."""


class Number(Tensor):
    """A tensor that stands for a number: no precision casts it, and it is promoted as a number."""


def is_replaceable(leaf: object) -> bool:
    """Return whether a tensor may stand for an input; zero is no such number, as Python refuses to divide by it.

    >>> [is_replaceable(each) for each in (3, 0.5, True, 0, float("inf"), 2**60)]
    [True, True, False, False, False, False]
    """
    if type(leaf) is int:
        return 0 < abs(leaf) <= EXACT
    return type(leaf) is float and math.isfinite(leaf) and leaf != 0


def tensor_for(number: int | float, dtype: torch.dtype) -> Tensor:
    """Return the tensor for a number. It is on the CPU on every mesh: GPUs take it there as they take numbers."""
    return torch.tensor(number, dtype=dtype, device="cpu")
