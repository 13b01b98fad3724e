"""The cross-entropy of rows that keep their dims: samples and positions, in place of a list of both.

    cross_entropy_loss(self, target, weight, reduction, ignore_index, label_smoothing) -> loss

As ATen's, with classes in the last dim of `self`, behind any number of dims of rows, so that each may be split.
`capture.rows.samples` finds the place of this operator in a model's graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _cross_entropy_loss(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, label_smoothing: float
) -> Tensor:
    loss = torch.ops.aten.cross_entropy_loss(
        self.flatten(0, -2), target.flatten(), weight, reduction, ignore_index, label_smoothing
    )
    return loss.view(target.shape) if loss.ndim else loss


torch.library.define(
    "autopar::cross_entropy_loss",
    "(Tensor self, Tensor target, Tensor? weight, int reduction, int ignore_index, float label_smoothing) -> Tensor",
)
# A composite: its derivative is that of what it calls.
torch.library.impl("autopar::cross_entropy_loss", "CompositeImplicitAutograd", _cross_entropy_loss)

CROSS_ENTROPY: torch._ops.OpOverload = torch.ops.autopar.cross_entropy_loss.default
"""self (…, V), target (…) of classes, weight (V) → () for a mean or a sum over rows, (…) for none."""
