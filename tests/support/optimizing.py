"""Optimizers by name, and steps of them, so that ranks and one process take the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

import autopar

Batch = TypeVar("Batch")


def planned_for(kind: str, rank: int) -> autopar.Optimizer:
    """Build the optimizer to plan for, by name; GaLore has a rank."""
    return autopar.Optimizer(kind, rank=rank) if kind == "galore" else autopar.Optimizer(kind)


def losses_of(
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    before_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """The losses of one step for each batch, or number of one; gradients may be changed before each step."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses
