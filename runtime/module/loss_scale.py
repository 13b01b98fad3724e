"""The scale of a gradient scaler, put on the gradient of a loss: the loss itself stays as it is.

Gradients of float16 models vanish unless they are scaled up (Micikevicius et al., ICLR 2018). A loss that is multiplied
would have to be divided again before anybody sees it, and would overflow first; its gradient is all that counts.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.ir.program.operators.derivatives import once_differentiable


def scale_of(scaler: Any, device: str | torch.device) -> Tensor | None:
    """Return the scale of a `ShardedGradScaler`; None without one.

    A scaler makes its scale when it is first used: a rank without the loss calls this too.

    Raises InputError for a scaler with which ranks would decide apart whether to skip a step.
    """
    if scaler is not None and not hasattr(scaler, "process_group"):
        raise InputError(
            f"model.scaler is a {type(scaler).__name__}, which looks for overflow in the gradients that a rank holds, "
            "so that one rank skips a step that another takes; give a ShardedGradScaler "
            "(torch.distributed.fsdp.sharded_grad_scaler) whose process group is that of all ranks."
        )
    return None if scaler is None else scaler.scale(torch.ones((), device=device))


def with_scaled_gradient(loss: Tensor, scale: Tensor | int | None) -> Tensor:
    """Return the loss; what its backward starts with is multiplied by the scale."""
    return loss if scale is None else _ScaledGradient.apply(loss, scale)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor | int) -> Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad * ctx.scale).to(grad.dtype), None
