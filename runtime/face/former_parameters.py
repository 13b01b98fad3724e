"""Refuse steps of optimizers that hold the parameters a model had before it was compiled: they change nothing.

`autopar.compile` stores parameters anew. An optimizer that was made before holds the former ones, which get no gradient
from the compiled module, so that its step does nothing without a word. An optimizer that trains the original model for
itself, beside the compiled one, finds gradients there and steps.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import InputError


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


def refuse_steps_of_originals(compiled: nn.Module, original: nn.Module) -> None:
    """Have an optimizer of the original's parameters fail in its first step after a backward of the compiled module.

    The error is an InputError. Nothing is left behind when no compiled module is alive.
    """
    _ORIGINALS.add(compiled, original)
