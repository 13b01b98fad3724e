"""Hooks that a forward registers: those on its tensors become calls of the graph, those on modules stay with the model.

Hooks that would be lost are refused.
"""

from __future__ import annotations

import contextlib
import functools
import operator
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
from autopar.ir.program.python_state import ATOMS, HOOK_TABLES, Position, RegisteredHooks

LOST: Mapping[str, str] = {
    "retain_grad": "a compiled module keeps no intermediate results: return the tensor, or save its gradient in a hook "
    "(register_hook)",
    "register_post_accumulate_grad_hook": "each call would add one: register it once, outside of forward",
}


class TensorHooks:
    """The hooks of one trace, in the order in which the forward registers them."""

    def __init__(self, traced: nn.Module, model: nn.Module) -> None:
        """`traced` is a copy of `model`; hooks that know the one are to act on the other."""
        self._rebinding = Rebinding(traced, model)
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
        refused = (
            f"a gradient hook ({location}) uses a tensor of the forward, which a graph does not keep for it; write the "
            "operation as a custom operator with a backward of its own (torch.library.custom_op)."
        )
        self.hooks.append(self._rebinding.bound(hook, refused))
        GRADIENT_HOOK(tensor, len(self.hooks) - 1)
        return _Handle(self.hooks, len(self.hooks) - 1)


class Rebinding:
    """Replacement of the modules of one copy of a model by those of another, in functions that know them."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        theirs = dict(other.named_modules(remove_duplicate=False))
        pairs = [(mine, theirs[path]) for path, mine in one.named_modules(remove_duplicate=False) if path in theirs]
        self._modules = {id(mine): their for mine, their in pairs}
        self._open: set[types.FunctionType] = set()
        self.attributes = {
            id(value): vars(their)[name]
            for mine, their in pairs
            for name, value in vars(mine).items()
            if name in vars(their) and not isinstance(value, ATOMS)
        }
        """Id → counterpart of each list or object in an attribute of a module."""

    def bound(self, hook: Any, refused: str | None = None) -> Any:
        """Return a hook for the other copy; CaptureError with the text `refused` if it holds a tensor."""
        if isinstance(hook, types.MethodType):
            return types.MethodType(self.bound(hook.__func__, refused), self._kept(hook.__self__, refused))
        if isinstance(hook, functools.partial):
            args = (self._kept(value, refused) for value in hook.args)
            kwargs = {name: self._kept(value, refused) for name, value in hook.keywords.items()}
            return functools.partial(self.bound(hook.func, refused), *args, **kwargs)
        if isinstance(hook, types.BuiltinMethodType) and not isinstance(hook.__self__, types.ModuleType):
            return getattr(self._kept(hook.__self__, refused), hook.__name__)
        if not isinstance(hook, types.FunctionType) or hook in self._open:
            return hook
        with self._not_entered_again(hook):
            cells = tuple(self._cell(cell, refused) for cell in hook.__closure__ or ())
            defaults = tuple(self._kept(value, refused) for value in hook.__defaults__ or ())
            named = {name: self._kept(value, refused) for name, value in (hook.__kwdefaults__ or {}).items()}
        held = (*(hook.__closure__ or ()), *(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values())
        if all(map(operator.is_, held, (*cells, *defaults, *named.values()))):
            return hook
        itself = types.CellType()
        cells = tuple(itself if _content(cell) is hook else cell for cell in cells)
        itself.cell_contents = bound = types.FunctionType(
            hook.__code__, hook.__globals__, hook.__name__, defaults, cells
        )
        bound.__kwdefaults__ = named
        return bound

    def _cell(self, cell: types.CellType, refused: str | None) -> types.CellType:
        """Return the cell itself where its content stays, so that what is set there later is seen."""
        content = _content(cell)
        kept = self._kept(content, refused)
        return cell if kept is content else types.CellType(kept)

    @contextlib.contextmanager
    def _not_entered_again(self, function: types.FunctionType) -> Iterator[None]:
        """Leave a function alone inside, as it may hold itself."""
        self._open.add(function)
        try:
            yield
        finally:
            self._open.remove(function)

    def _kept(self, value: Any, refused: str | None) -> Any:
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            return self.bound(value, refused)
        if id(value) in self.attributes:
            return self.attributes[id(value)]
        if refused is not None and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            raise CaptureError(refused)
        return value


def _content(cell: types.CellType) -> Any:
    """Return what a cell of a closure holds; None where nothing was put there so far."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def hooks_in(model: nn.Module) -> dict[Position, Any]:
    """Return the entries of all tables of forward hooks in a model."""
    tables = ((path, name, vars(module)[name]) for path, module in model.named_modules() for name in HOOK_TABLES)
    return {(path, name, number): entry for path, name, table in tables for number, entry in table.items()}


def with_own_hooks(copied: nn.Module, model: nn.Module) -> nn.Module:
    """Let the forward hooks of a copy of a model know its own modules in closures, which `copy.deepcopy` shares."""
    hooks = hooks_in(copied)
    if hooks:
        rebinding = Rebinding(model, copied)
        for kind in ("named_parameters", "named_buffers"):
            theirs = dict(getattr(copied, kind)())
            rebinding.attributes.update((id(mine), theirs[name]) for name, mine in getattr(model, kind)())
        for (path, table, number), hook in hooks.items():
            vars(copied.get_submodule(path))[table][number] = rebinding.bound(hook)
    return copied


def registered_hooks(model: nn.Module, traced: nn.Module, entries: Mapping[Position, Any]) -> RegisteredHooks:
    """Return the forward hooks that the forward of `traced`, a copy of `model`, has left in modules.

    Modules that the forward has made itself, which no other copy has, are left out. Raises CaptureError if a hook
    holds a tensor.
    """
    if not entries:
        return RegisteredHooks()
    paths = {path for path, _ in model.named_modules()}
    rebinding, found = Rebinding(traced, model), {}
    for at, hook in entries.items():
        refused = (
            f"the forward registers a forward hook on {at[0] or 'the model'} ({getattr(hook, '__qualname__', hook)}) "
            "that holds a tensor of the forward, which later calls do not have; register the hook before autopar sees "
            "the model."
        )
        if at[0] in paths:
            found[at] = rebinding.bound(hook, refused)
    return RegisteredHooks(found, lambda root: Rebinding(model, root).bound)


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
