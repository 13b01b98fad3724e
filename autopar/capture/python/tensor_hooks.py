"""Hooks that a forward registers on its tensors become calls of the graph; hooks that would be lost are refused."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.python.user_code import where
from autopar.errors import CaptureError
from autopar.ir.program.gradient_hooks import GRADIENT_HOOK, Hook
from autopar.ir.program.python_state import ATOMS

LOST: Mapping[str, str] = {
    "retain_grad": "a compiled module keeps no intermediate results: return the tensor, or save its gradient in a hook "
    "(register_hook)",
    "register_post_accumulate_grad_hook": "each call would add one: register it once, outside of forward",
}


class TensorHooks:
    """The hooks of one trace, in the order in which the forward registers them."""

    def __init__(self, traced: nn.Module, model: nn.Module) -> None:
        """`traced` is a copy of `model`; hooks that know the one are to act on the other."""
        self._modules = dict(zip(map(id, traced.modules()), model.modules(), strict=True))
        self._attributes = {
            id(value): vars(mine)[name]
            for copied, mine in zip(traced.modules(), model.modules(), strict=True)
            for name, value in vars(copied).items()
            if name in vars(mine) and not isinstance(value, ATOMS)
        }
        """Original of each list or object in an attribute of the copied model, by the copy's id."""
        self._traced = traced
        self.hooks: list[Hook] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Take hooks into the graph inside; CaptureError for those that a graph cannot keep."""

        def register(tensor: Tensor, hook: Hook) -> _Handle:
            return self._register(tensor, hook, where(sys._getframe(1)))

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Tensor, "register_hook", register))
            for name, advice in LOST.items():
                stack.enter_context(mock.patch.object(Tensor, name, _refusing(name, advice)))
            yield

    def _register(self, tensor: Tensor, hook: Hook, location: str) -> _Handle:
        if any(tensor is parameter for parameter in self._traced.parameters()):
            raise CaptureError(
                f"the forward registers a hook on a parameter ({location}), one more with every call; register it "
                "once, outside of forward."
            )
        if not tensor.requires_grad:
            raise CaptureError(f"the forward registers a hook on a tensor without gradient ({location}).")
        if not torch.is_grad_enabled():
            raise CaptureError(
                f"the forward registers a hook where gradients are off ({location}); do so outside of torch.no_grad()."
            )
        self.hooks.append(self._bound(hook, location))
        GRADIENT_HOOK(tensor, len(self.hooks) - 1)
        return _Handle(self.hooks, len(self.hooks) - 1)

    def _bound(self, hook: Any, location: str) -> Hook:
        """The hook with the modules of the model in place of those that are traced."""
        if isinstance(hook, types.MethodType):
            return types.MethodType(self._bound(hook.__func__, location), self._kept(hook.__self__, location))
        if isinstance(hook, functools.partial):
            args = (self._kept(value, location) for value in hook.args)
            kwargs = {name: self._kept(value, location) for name, value in hook.keywords.items()}
            return functools.partial(self._bound(hook.func, location), *args, **kwargs)
        if isinstance(hook, types.BuiltinMethodType) and not isinstance(hook.__self__, types.ModuleType):
            return getattr(self._kept(hook.__self__, location), hook.__name__)
        if not isinstance(hook, types.FunctionType):
            return hook
        cells = tuple(types.CellType(self._kept(cell.cell_contents, location)) for cell in hook.__closure__ or ())
        defaults = tuple(self._kept(value, location) for value in hook.__defaults__ or ())
        bound = types.FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, cells)
        bound.__kwdefaults__ = {
            name: self._kept(value, location) for name, value in (hook.__kwdefaults__ or {}).items()
        }
        return bound

    def _kept(self, value: Any, location: str) -> Any:
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            return self._bound(value, location)
        if id(value) in self._attributes:
            return self._attributes[id(value)]
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            raise CaptureError(
                f"a gradient hook ({location}) uses a tensor of the forward, which a graph does not keep for it; write "
                "the operation as a custom operator with a backward of its own (torch.library.custom_op)."
            )
        return value


class _Handle:
    """Handle that register_hook returns, with which the hook can be removed again."""

    def __init__(self, hooks: list[Hook], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        """Let the hook do nothing."""
        self._hooks[self._number] = _nothing


def _nothing(gradient: Tensor) -> None:
    return None


def _refusing(name: str, advice: str) -> Callable[..., Any]:
    def refuse(tensor: Tensor, *args: Any) -> Any:
        raise CaptureError(f"the forward calls {name} on a tensor ({where(sys._getframe(1))}); {advice}.")

    return refuse
