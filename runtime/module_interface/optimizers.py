"""Watch the steps of optimizers: refuse those that would change nothing, and mend states that were loaded plain.

`autopar.compile` stores parameters anew. An optimizer that was made before holds the former ones, which get no gradient
from the compiled module, so that its step does nothing without a word. An optimizer that trains the original model
separately from the compiled one finds gradients there and steps.

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
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import InputError

PLAIN = frozenset(("step", "mu_product", "eta", "mu"))
"""States that `torch.optim` keeps as plain 0-dim tensors for every parameter."""


class _Originals:
    """The parameters of models that were compiled, and which optimizers were looked at since the last compilation."""

    def __init__(self) -> None:
        self._modules: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Parameter of an original → a reference to the compiled module."""
        self._passed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._alive = 0
        self._hook: RemovableHandle | None = None

    def add(self, compiled: nn.Module, original: nn.Module) -> None:
        reference = weakref.ref(compiled)
        for parameter in original.parameters():
            self._modules[parameter] = reference
        self._passed.clear()
        self._alive += 1
        weakref.finalize(compiled, self._gone)
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._check)

    def _gone(self) -> None:
        self._alive -= 1
        if self._alive == 0 and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._passed:
            return
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        former = [parameter for parameter in held if parameter in self._modules]
        if any(parameter.grad is not None for parameter in held) or not former:
            self._passed.add(optimizer)
            return
        compiled = self._modules[former[0]]()
        if compiled is not None and any(parameter.grad is not None for parameter in compiled.parameters()):
            raise InputError(
                f"{type(optimizer).__name__} was made before autopar.compile and holds {len(former)} parameters of the "
                "original model, which get no gradients: this step would change nothing. "
                "Make the optimizer after autopar.compile, from compiled.parameters()."
            )


_ORIGINALS = _Originals()


def watch_optimizers(compiled: nn.Module, original: nn.Module, parameters: Iterable[Any]) -> None:
    """Have optimizers checked before each step, as long as the compiled module is alive.

    An optimizer of the original's parameters fails with an InputError in its first step after a backward of the
    compiled module. Plain states of 0-dim DTensors among the `parameters` are distributed.
    """
    _ORIGINALS.add(compiled, original)
    if any(isinstance(each, DTensor) and each.ndim == 0 for each in parameters):
        weakref.finalize(compiled, register_optimizer_step_pre_hook(_distribute).remove)


def _distribute(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.ndim == 0 and isinstance(parameter, DTensor):
                state, mesh = optimizer.state.get(parameter, {}), parameter.device_mesh
                for name, value in state.items():
                    if name not in PLAIN and torch.is_tensor(value) and not isinstance(value, DTensor):
                        local = value.to(parameter.to_local().device)
                        state[name] = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
