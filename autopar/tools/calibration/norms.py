"""Root mean square norms as models in half precision write them: most of what such a model computes elementwise.

They are computed in float32, and written out: casts there and back, squares, a mean, products by one number for each
row and by one for each column. An eager backward of these moves more than it is counted to, so that what a device
reaches of the counted bytes is less than what one product or sum of two tensors does: on an H200 2.0 to 2.2 TB/s, where
products and sums reach 5.1 (`benchmarks/results/gpu-h200.txt`).
"""

from __future__ import annotations

import torch
from torch import Tensor

FEATURES = 4096
EPSILON = 1e-5


def norm(x_ND: Tensor, weight_D: Tensor) -> Tensor:
    """Compute the norm as transformers' RMSNorm does."""
    wide = x_ND.float()
    return weight_D * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x_ND.dtype)


def counted_bytes(x_ND: Tensor) -> int:
    """Return the bytes that `cost.forward_seconds` counts for a norm, forward and backward.

    Tensors with one number per row are left out. Each operation counts its inputs and outputs, once more for each input
    with a gradient: the casts, the square and the mean have one such input, the products two.
    """
    narrow, wide = x_ND.itemsize, torch.float32.itemsize
    casts, square, mean = 2 * 2 * (narrow + wide), 2 * 2 * wide, 2 * wide
    return x_ND.numel() * (casts + square + mean + 3 * 2 * wide + 3 * 2 * narrow)
