"""Masks that hide keys by the lowest finite numbers, as `finfo.min`: as by -inf, where every query sees a key.

Beside such a number nothing is left of a score, so that the softmax of a query without keys is the mean of all values.
There PyTorch's kernels differ from each other, by their gradients, and no other row of a mask tells what is right.
"""

from __future__ import annotations

import math

from torch import Tensor

from autopar.capture.masks.hiding import LOWEST
from autopar.capture.masks.reading import Reading
from autopar.capture.masks.seen import constants
from autopar.ir.program.operators.attention.expressions import Call, Expression, evaluate


def hidden_by_infinity(mask: Expression) -> Expression:
    """Return the mask with -inf in place of the lowest numbers."""
    return Call("masked_fill", (mask, Call("lt", (mask, LOWEST)), -math.inf))


def all_see_themselves(mask: Expression, reading: Reading) -> bool:
    """Return whether every query of a square mask is certain to see the key of its own position, whatever the data."""
    vectors = constants(reading.vectors)
    return vectors is not None and bool((evaluate(mask, list(map(_diagonal, vectors))) > LOWEST).all())


def _diagonal(vector: Tensor) -> Tensor:
    """Return the elements of a vector at which a query meets the key of its own position."""
    if vector.ndim < 2:
        return vector
    return vector[..., 0, :] if vector.shape[-2] == 1 else vector[..., 0]
