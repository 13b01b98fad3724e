"""Optimizers by name, and steps of them, so that ranks and one process take the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import autopar


def planned_for(kind: str, rank: int) -> autopar.Optimizer:
    """Build the optimizer to plan for, by name; GaLore has a rank."""
    return autopar.Optimizer(kind, rank=rank) if kind == "galore" else autopar.Optimizer(kind)


def losses_of(
    optimizer: torch.optim.Optimizer,
    steps: int,
    loss_of: Callable[[int], Tensor],
    before_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """The losses of so many steps, of which each has a loss of its own batch; gradients may be changed before each."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses
