"""Calls of a submodule by itself, as methods of a model make them (`self.encoder(x)`): they run on what is stored here.

Tensors that are whole on every rank give the results of one process, as long as all ranks give the same. Refused is
what does not: parameters in parts meet a plain tensor, or gradients are of this rank's samples and nobody sums them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError


def check_direct_calls(tree: nn.Module, gives_parts: bool) -> None:
    """Let submodules of a compiled module fail where a call by itself would be wrong.

    `gives_parts`: ranks give different parts of a batch. Copies of the modules, which are captured, are not checked.
    """
    for name, module in tree.named_modules():
        if name and next(module.parameters(), None) is not None and module._compiled_call_impl is None:
            module._compiled_call_impl = _Checked(module, name, gives_parts)


class _Checked:
    """Runs a module after a look at what it is called with; torch.nn.Module calls it in place of its own code."""

    def __init__(self, module: nn.Module, name: str, gives_parts: bool) -> None:
        self._module, self._name, self._gives_parts = weakref.ref(module), name, gives_parts

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the module runs its own code; recurrent nets copy this attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if self._in_parts(module) and any(not isinstance(x, DTensor) for x in given):
            raise InputError(
                f"{self._name} is called by itself with a plain tensor, and its parameters are stored in parts; "
                f"{_INSTEAD}, or give it DTensors."
            )
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters())
        if learns and self._gives_parts and not self._in_parts(module):
            raise InputError(
                f"{self._name} is called by itself on this rank's samples, and its gradients would not be summed with "
                f"those of other ranks; {_INSTEAD}, or call it under torch.no_grad()."
            )
        return module._call_impl(*args, **kwargs)

    def _in_parts(self, module: nn.Module) -> bool:
        return any(isinstance(each, DTensor) for each in module.parameters())


_INSTEAD = "call the compiled model, whose forward may call it"
