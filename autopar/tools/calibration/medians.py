"""Standard error of a median, if the values vary normally."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import Tensor

QUARTILES_APART = 1.349  # standard deviations between the quartiles of a normal distribution
OF_THE_MEAN = math.sqrt(math.pi / 2)  # times the standard error of the mean

Values = TypeVar("Values", float, Tensor)


def standard_error(between_quartiles: Values, count: int) -> Values:
    """Return the standard error of the median of `count` values, in their unit, from their interquartile range.

    >>> round(standard_error(1.349, 100), 4)
    0.1253
    """
    return between_quartiles * (OF_THE_MEAN / QUARTILES_APART / math.sqrt(count))
