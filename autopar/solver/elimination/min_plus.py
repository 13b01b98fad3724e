"""The least sums of two tables over a dimension that both have: their product where plus is min and times is plus.

PyTorch computes max_i |x_i − y_i| (the Chebyshev distance) of all pairs of points in one pass, on all cores, without an
array of all differences. Where M is at least every sum that may be the least of its pair,

    M − min_i (a_i + b_i) = max_i |(M − a_i) − b_i|
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from autopar.solver.problem import Floats


def least_sums(ones: Floats, others: Floats) -> Floats:
    """min_i ones[b, j, i] + others[b, k, i] as [b, j, k]; infinite where all sums are.

    What each j and each k costs at least is taken out before and added again after, and what is above the least sum of
    any pair is cut off: M is near the sums that matter, and rounds them as they would be anyhow.
    """
    least, least_other = _finite_minimum(ones), _finite_minimum(others)
    ones, others = ones - least, others - least_other
    most = (ones.max(axis=1) + others.max(axis=1)).min(axis=1)  # no pair takes more than the i that is good for all
    if not np.isfinite(most).all():
        most = np.where(np.isfinite(most), most, _finite_maximum(ones) + _finite_maximum(others))
    cut = np.where(most > 0, 2 * most, 1.0)[:, None, None]
    ones, others = 2 * cut - np.minimum(ones, cut), np.minimum(others, cut)
    with _disable_current_modes():  # a plan may be made under a mode that fakes or redirects tensors
        found = torch.cdist(torch.from_numpy(ones), torch.from_numpy(others), p=math.inf).numpy()
    np.subtract(2 * cut, found, out=found)
    found[found >= cut] = np.inf
    found += least
    found += least_other.transpose(0, 2, 1)
    return found


def _finite_minimum(points: Floats) -> Floats:
    """Of every point its least coordinate, as [b, j, 1]; 0 where none is finite."""
    least = points.min(axis=2, keepdims=True)
    least[np.isinf(least)] = 0.0
    return least


def _finite_maximum(points: Floats) -> float:
    return float(points.max(where=np.isfinite(points), initial=0.0))
