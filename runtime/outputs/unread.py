"""An output that is moved into the user's layout when it is first used: what nobody reads costs nothing.

A loss whose sum overlaps with the backward is waited for when it is first used, and `loss.backward()` does not use it.
Functions of torch that take an `Unread` run on the plain tensor, which is made once. Shape, dtype, device and the like
are known without it. An `Unread` has a place in the autograd graph of its own, in front of the plain tensor.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.direct import applied_eagerly

KNOWN = frozenset(
    (
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "itemsize", "nbytes")
        ),
        *(getattr(Tensor, f"is_{name}").__get__ for name in ("cpu", "cuda", "meta", "sparse", "quantized", "nested")),
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.get_device),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    )
)
"""Functions that need no values."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Steps to read an output: `read` moves a rank's part, `enter` takes a gradient back, `cut` finishes the whole."""

    read: Callable[[Tensor], Tensor]
    enter: Callable[[Tensor], Tensor]
    cut: Callable[[Tensor], Tensor]


class Unread(Tensor):
    """A tensor whose values are moved on first use, by all ranks together."""

    _part: Tensor
    _reading: Reading
    _plain: Tensor | None
    _start: Tensor | None
    """This rank's part of a sum, at which a backward that needs no values may begin."""

    @property
    def plain(self) -> Tensor:
        """The plain tensor, with its place in the autograd graph."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._plain is None:
                # Whoever reads first may do so under no_grad, and the next reader needs the gradient.
                with torch.inference_mode(False), torch.set_grad_enabled(self.requires_grad):
                    self._plain = self._reading.cut(_Read.apply(self))
            return self._plain

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on plain tensors, unless it asks for what is known."""
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.backward and args[0]._plain is None and args[0]._start is not None:
            return func(args[0]._start, *args[1:], **(kwargs or {}))
        args, named = pytree.tree_map_only(Unread, lambda x: x.plain, (args, kwargs or {}))
        return func(*args, **named)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that comes past Python, as those of torch.distributed, on the values."""
        args, named = pytree.tree_map_only(Unread, lambda x: x.plain.detach(), (args, kwargs or {}))
        return func(*args, **named)


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: torch.Size, reading: Reading, start: Tensor | None) -> Tensor:
        ctx.reading = reading
        made = Tensor._make_wrapper_subclass(Unread, shape, dtype=part.dtype, device=part.device)
        made._part = part.detach() if start is None else part
        made._reading, made._plain, made._start = reading, None, start
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.reading.enter(grad), None, None, None


class _Arriving(_Unread):
    """An `_Unread` of a sum with a second derivative: its gradient is that of the parts."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unread: Unread) -> Tensor:
        found = unread._reading.read(unread._part)
        return found.clone() if found._is_view() else found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def unread(part: Tensor, shape: Sequence[int], reading: Reading) -> Unread:
    """Return the output of this shape of which a rank holds `part`."""
    return _Unread.apply(part, torch.Size(shape), reading, None)


def arriving(part: Tensor, arrived: Callable[[], Tensor]) -> Unread:
    """Return the sum of all ranks' parts, for which its first use waits, as `arrived` does.

    A backward that begins before begins at `part`.
    """
    reading = Reading(lambda _: arrived(), lambda grad: grad, lambda whole: whole)
    return applied_eagerly(_Arriving, part, part.shape, reading, part)
