"""The casts of autocast as explicit calls: autocast itself is queried for what it does to an operation.

policy   an operation whose inputs become
low      the autocast dtype: bf16 comes out of fp32
full     fp32: fp32 comes out of bf16
promote  the widest dtype among them

Each type of device has its own (softmax, norms, powers and sums are full on CUDA, and none of these on the CPU), and
that of the mesh counts. PyTorch has the policies of all of them, and answers for tensors without memory on devices
that are not there: `torch.autocast` alone refuses those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from autopar.capture.passes.traced_graph import TracedGraph, aten, call_key
from autopar.errors import CaptureError
from autopar.ir.torch_state import fake_tensor_errors_unlogged

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
"""Type of device → the dispatch key under which its policy is registered."""


@dataclass(frozen=True, slots=True)
class Autocast:
    """An autocast region: the type of device whose policy counts, and the dtype."""

    device: str
    dtype: torch.dtype

    @classmethod
    def around(cls, device: str | None) -> Autocast | None:
        """Return the region that now is on for a type of device (None: for any)."""
        if device is not None:
            return cls(device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        found = (each for each in KEYS if torch.is_autocast_enabled(each))
        return next((cls(each, torch.get_autocast_dtype(each)) for each in found), None)

    @property
    def key(self) -> str:
        """Its dispatch key; that of the CPU where there is no policy to ask."""
        return KEYS.get(self.device, KEYS["cpu"])

    def casts_whole(self, op: torch._ops.OpOverload) -> bool:
        """Return whether the autocast policy has an entry for an operation as a whole."""
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), self.key)


@dataclass(slots=True)
class Casts:
    """The casts of one autocast region; a tensor is cast once, as autocast casts a weight once."""

    draft: TracedGraph
    region: Autocast
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)
    requested: dict[object, torch.dtype | None] = field(default_factory=dict)
    """The answers of autocast, by `call_key`."""

    def applied(self, target: Callable[..., Any], args: Any, kwargs: Any, module: str) -> Arguments:
        """Return the arguments with which the call gives, without autocast, what it gives under it."""
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return args, kwargs
        key = call_key(target, args, kwargs)
        wanted = self.requested[key] if key in self.requested else self._cast_dtype(target, args, kwargs)
        if key is not None:
            self.requested[key] = wanted
        if wanted is None:
            return args, kwargs

        def cast(value: Any) -> Any:
            if not isinstance(value, fx.Node) or not _is_cast(value.meta["val"], wanted):
                return value
            if (value, wanted) not in self.made:
                self.made[value, wanted] = self.draft.call(aten.to.dtype, value, wanted, module=module)
            return self.made[value, wanted]

        return map_aggregate((args, kwargs), cast)  # type: ignore[return-value]

    def _cast_dtype(self, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> torch.dtype | None:
        """Return the dtype that the call's floating-point inputs are cast to; None: they stay as they are."""
        values = map_arg((args, kwargs), lambda node: node.meta["val"])
        floats = [x.dtype for x in pytree.tree_leaves(values) if _is_float(x)]
        if not floats:
            return None
        if self.region.casts_whole(target):
            if self._result(target, _all_as(values, torch.float32)) == self.region.dtype:
                return self.region.dtype
            if self._result(target, _all_as(values, self.region.dtype)) == torch.float32:
                return torch.float32
            return max(floats, key=lambda dtype: dtype.itemsize)
        found = self._result(target, values)
        plain = self._result(target, values, enabled=False)
        if found in (None, plain):
            return None
        if self._result(target, _all_as(values, found), enabled=False) != found:
            raise CaptureError(
                f"{target} gives {found} under autocast({self.region.dtype}), by casts inside of it that cannot be "
                "told; run it outside autocast."
            )
        return found

    def _result(self, target: Callable[..., Any], values: Any, enabled: bool = True) -> torch.dtype | None:
        """Return the dtype of the call's first floating-point output; None where it has none, or the call is
        refused.
        """
        device = "cuda" if self.region.key == KEYS["cuda"] else "cpu"
        try:
            region = autocasting(device, self.region.dtype, enabled)
            with self.draft.mode, torch.no_grad(), region, fake_tensor_errors_unlogged():
                args, kwargs = _values_on(device, values)
                found = target(*args, **kwargs)
        except (RuntimeError, ValueError):
            return None
        return next((x.dtype for x in pytree.tree_leaves(found) if _is_float(x)), None)


@contextlib.contextmanager
def autocasting(device: str, dtype: torch.dtype, enabled: bool) -> Iterator[None]:
    """Enter `torch.autocast`, also for an absent device, and without its cache of casts, which only leaves have."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def _values_on(device: str, values: Any) -> Any:
    """Return the values with tensors on another device, which have no memory; PyTorch without CUDA has no gradients
    there.
    """
    if device == "cpu":
        return values

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return torch.device(device) if isinstance(value, torch.device) else value

    return pytree.tree_map(there, values)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_cast(value: Any, dtype: torch.dtype) -> bool:
    """Return whether autocast would cast a value: a floating-point tensor of another dtype, but never float64."""
    return _is_float(value) and value.dtype not in (dtype, torch.float64)


def _all_as(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.detach().to(dtype) if isinstance(value, Tensor) and _is_cast(value, dtype) else value

    return pytree.tree_map(cast, values)
