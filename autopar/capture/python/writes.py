"""Writes that autograd does not see while a forward is traced: `x.data = y`, `x.data.mul_(2)`, `x.set_(y)`.

Reading `x.data` becomes `x.detach()`, and assigning it becomes a call of SET_DATA: both are in the graph then. Writes
into parameters are refused where they are made, because only an optimizer may write parameters.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.python.user_code import where
from autopar.errors import CaptureError
from autopar.ir.program.operators.set_data import SET_DATA

READ_DATA = Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
ASSIGN_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
NO_WRITES = frozenset({"requires_grad_", "share_memory_", "detach_"})
"""Methods that end in an underscore and leave the values of their tensor."""


class Writes(TorchFunctionMode):
    """Takes writes past autograd into the graph, and refuses those that a graph cannot hold."""

    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self._traced = traced
        self._running = False
        self._parameters: dict[int, str] = {}
        """Storage → name, while the forward runs."""
        self._before: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        """Name → parameter or buffer, and its storage as the forward begins."""

    def begin(self, *_: object) -> None:
        """Note where parameters and buffers lie; the exporter has its own in their place while the forward runs."""
        named = (*self._traced.named_parameters(), *self._traced.named_buffers())
        self._before = {name: (tensor, _storages(tensor)) for name, tensor in named}
        self._parameters = {
            storage: name
            for name, (tensor, found) in self._before.items()
            if isinstance(tensor, nn.Parameter)
            for storage in found
        }
        self._running = True

    def end(self, *_: object) -> None:
        """Raise CaptureError if a parameter or buffer was moved by a call that is not in the graph."""
        self._running = False
        for name, (tensor, storage) in self._before.items():
            if _storages(tensor) != storage:
                raise CaptureError(
                    f"the forward gives {name} other memory by a call that a graph cannot hold; copy the values into "
                    f"it (copy_)."
                )

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running and getattr(func, "overloadpacket", func) in (torch.ops.aten.set_, Tensor.set_):
            raise CaptureError(
                f"the forward calls set_ on a tensor ({where(sys._getframe(1))}), which a graph cannot hold; copy the "
                "values (x.copy_(y)), or assign x.data = y."
            )
        if not self._running or get_proxy_mode() is None:
            return func(*args, **kwargs)
        if func == READ_DATA:
            return args[0].detach()
        name = getattr(func, "__name__", "")
        if getattr(func, "__module__", "") == "torch.nn.init" and _receives_gradients(
            args[0] if args else kwargs.get("tensor")
        ):
            raise CaptureError(
                f"the forward fills a tensor with a gradient by nn.init.{name} ({where(sys._getframe(1))}), whose "
                "torch.no_grad() an exported graph loses; write with torch.no_grad(): around the call."
            )
        if func == ASSIGN_DATA:
            self._check_parameter(args[0])
            return _assign(args[0], args[1])
        if "out" in kwargs:
            for out in pytree.tree_leaves(kwargs["out"]):
                self._check_parameter(out)
        elif is_write(name):
            self._check_parameter(args[0] if args else kwargs.get("tensor"))  # the keyword of torch.nn.init
        return func(*args, **kwargs)

    def _check_parameter(self, tensor: Any) -> None:
        """Raise CaptureError if a tensor lies in the memory of a parameter."""
        for storage in _storages(tensor):
            if storage in self._parameters:
                raise CaptureError(refused_parameter(self._parameters[storage], where(sys._getframe(2))))


def refused_parameter(name: str, location: str) -> str:
    """Return the message for a forward that writes into a parameter."""
    return (
        f"the forward writes into the parameter {name}{f' ({location})' if location else ''}, and autopar changes "
        "parameters through an optimizer only. Register what the forward changes as a buffer, or compute with a copy."
    )


@contextlib.contextmanager
def writes_past_autograd(traced: nn.Module) -> Iterator[None]:
    """Let the graph hold every write of a forward that is traced inside."""
    writes = Writes(traced)
    handles = traced.register_forward_pre_hook(writes.begin), traced.register_forward_hook(writes.end)
    try:
        with writes:
            yield
    finally:
        for handle in handles:
            handle.remove()


def _storages(tensor: Any) -> tuple[int, ...]:
    """Return the memory that a tensor lies in; a sparse tensor, or one under a transform, has none to name."""
    has_one = isinstance(tensor, Tensor) and torch._C._has_storage(tensor)
    return (tensor.untyped_storage()._cdata,) if has_one else ()


def _receives_gradients(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def is_write(name: str) -> bool:
    """Return whether a method of this name writes into its tensor: `add_`, `__setitem__`, `__iadd__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") and name not in NO_WRITES


def _assign(tensor: Tensor, value: Any) -> None:
    location = where(sys._getframe(2))
    if not isinstance(tensor, FakeTensor):
        raise CaptureError(
            f"the forward assigns the .data of a tensor ({location}) that is neither input, parameter nor buffer; "
            "register it with register_buffer."
        )
    if not isinstance(value, Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
        found = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CaptureError(
            f"the forward assigns {found} to the .data of a tensor that is {tensor.dtype} of shape "
            f"{list(tensor.shape)} ({location}); assign a tensor of the same shape and dtype, or give the result "
            "another name."
        )
    SET_DATA(tensor, value.detach())
