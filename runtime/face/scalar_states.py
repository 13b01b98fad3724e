"""Distribute optimizer states of 0-dim parameters that PyTorch leaves plain when it loads them.

`set_optimizer_state_dict` with `full_state_dict=True` distributes tensors of one or more dims only (torch 2.13,
`_distribute_state_dict`). The state of a 0-dim DTensor stays a plain tensor, and its in-place update by a DTensor
gradient fails with an AssertionError that has no message.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

PLAIN = frozenset(("step", "mu_product", "eta", "mu"))
"""States that `torch.optim` keeps as plain 0-dim tensors for every parameter."""


def distribute_scalar_states(module: nn.Module, parameters: Iterable[Any]) -> None:
    """Have optimizers distribute plain states of 0-dim DTensors before each step, while the module is alive."""
    if any(isinstance(each, DTensor) and each.ndim == 0 for each in parameters):
        hook = register_optimizer_step_pre_hook(_distribute)
        weakref.finalize(module, hook.remove)


def _distribute(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.ndim == 0 and isinstance(parameter, DTensor):
                state, mesh = optimizer.state.get(parameter, {}), parameter.device_mesh
                for name, value in state.items():
                    if name not in PLAIN and torch.is_tensor(value) and not isinstance(value, DTensor):
                        local = value.to(parameter.to_local().device)
                        state[name] = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
