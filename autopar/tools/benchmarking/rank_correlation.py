"""Spearman's rank correlation: agreement of the order of two lists of numbers.

The correlation of the ranks, equal numbers sharing the mean of theirs (Spearman, American Journal of Psychology 1904).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation, from −1 to 1; NaN for fewer than two pairs, or if all values are equal.

    >>> spearman([1, 2, 3], [10, 20, 15])
    0.5
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} numbers are no pairs.")
    ours, theirs = (ranks - ranks.mean() for ranks in (_ranks(first), _ranks(second)))
    scale = np.sqrt((ours**2).sum() * (theirs**2).sum())
    return float((ours * theirs).sum() / scale) if scale else float("nan")


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return the place of each value in their order, from 0; the mean place where several are equal."""
    array = np.asarray(values, dtype=float)
    if not array.size:
        return np.zeros(1)
    _, places, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts + 1) / 2)[places]
