"""The operator behind `autopar.constrain`: an identity that only carries a layout from a forward to the planner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _copy(x: Tensor, axes: list[str], dims: list[int]) -> Tensor:
    return x.clone()


# An operator may not return its input: eager runs copy, and the rewrite drops the call. Its derivative is that of the
# copy, without an autograd.Function, which could not be captured.
torch.library.define("autopar::constrain", "(Tensor x, str[] axes, int[] dims) -> Tensor")
torch.library.impl("autopar::constrain", "CompositeExplicitAutograd", _copy)
torch.library.impl("autopar::constrain", "Autograd", _copy)


@torch.library.register_fake("autopar::constrain")
def _(x: Tensor, axes: list[str], dims: list[int]) -> Tensor:
    return torch.empty_like(x)


CONSTRAIN: torch._ops.OpOverload = torch.ops.autopar.constrain.default


def is_constraint(target: Any) -> bool:
    """Return whether a call target is that of `autopar.constrain`, which states a layout and computes nothing."""
    return target is CONSTRAIN
