"""Muon (Jordan 2024): the momentum of each matrix, made orthogonal by Newton-Schulz iterations.

The iterations need the whole matrix. Where it is stored in parts, its momentum stays in parts, and what is to be made
orthogonal is gathered in bfloat16, one matrix at a time: an all-gather of the matrix in a step. `torch.optim.Muon` on
DTensors would multiply parts in bfloat16 and add these up, and so depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from autopar.errors import InputError
from autopar.optim.matrices import is_matrix
from autopar.optim.sharded_tensors import as_stored, whole
from autopar.optim.with_adamw import MatrixOptimizer, NamedParameters, adamw_settings

ADJUSTMENTS = ("original", "match_rms_adamw")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic iteration (Jordan 2024), as in torch.optim.Muon
EPS = 1e-7  # below which the norm of a matrix is not divided by: the same


class Muon(MatrixOptimizer):
    """`torch.optim.Muon` of the matrices of hidden layers, and AdamW of all other parameters.

    named_parameters: `model.named_parameters()`, whole or in parts
    lr, weight_decay, momentum, nesterov, ns_steps, adjust_lr_fn: of the matrices, as in `torch.optim.Muon`
    adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of the others
    matrices: patterns of names that are matrices, as in ("*.mlp.*",); by default those in numbered layers

    Raises InputError for parameters without names, and hyperparameters out of range.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.01,
        matrices: Sequence[str] | None = None,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0 or not 0 <= momentum < 1 or not 0 < ns_steps < 100:
            raise InputError(
                f"Muon was given lr={lr}, weight_decay={weight_decay}, momentum={momentum}, ns_steps={ns_steps}; give "
                "numbers of at least 0, a momentum below 1, and 1 to 99 steps."
            )
        if adjust_lr_fn not in (None, *ADJUSTMENTS):
            raise InputError(
                f"Muon was given adjust_lr_fn={adjust_lr_fn!r}; give None or one of "
                f"{', '.join(map(repr, ADJUSTMENTS))}."
            )
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        settings |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        others = adamw_settings(adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        super().__init__(named_parameters, settings, others, lambda name, shape: is_matrix(name, shape, matrices))

    def step_matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update one matrix by its orthogonalized momentum; `parameter` and `gradient` are this rank's parts."""
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        # Rounded as the iterations round it, but before it is gathered; copied, as they begin in place.
        update = whole((gradient.lerp(buffer, momentum) if group["nesterov"] else buffer).to(torch.bfloat16, copy=True))
        orthogonal = _zeropower_via_newtonschulz(update, COEFFICIENTS, group["ns_steps"], EPS)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        parameter.add_(as_stored(orthogonal, parameter).to(parameter.dtype), alpha=-lr)
