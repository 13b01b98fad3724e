"""Static arguments of a call: tensors that are replaced by their values, which a captured graph holds as constants.

A `StaticTensor` is a leaf like a number: calls with other values are other kinds of calls, and nothing splits it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
MAX_SHOWN = 24
"""Elements of a tensor whose values a message shows; of a larger one it shows a hash."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, eq=False)
class StaticTensor:
    """The values of a tensor, on the CPU; never written, and told apart by the text that stands for them."""

    values: Tensor
    text: str
    """Equal for equal dtypes, shapes and values."""

    @classmethod
    def of(cls, tensor: Tensor) -> StaticTensor:
        """Copy the values of a tensor; waits for its device."""
        values = tensor.detach().to("cpu", copy=True).contiguous()
        if values.numel() <= MAX_SHOWN:
            shown = str(values.tolist())
        else:
            shown = "sha256 " + hashlib.sha256(values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return cls(values, f"static {str(values.dtype).removeprefix('torch.')}{list(values.shape)} = {shown}")

    def __repr__(self) -> str:
        return self.text


def static_argnames_of(specified: Sequence[str] | None, model: nn.Module) -> tuple[str, ...]:
    """Return the names that `Capture(static_argnames=…)` gives; InputError for one that forward does not take."""
    if not specified:
        return ()
    parameters = inspect.signature(model.forward).parameters.values()
    named = [each.name for each in parameters if each.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name in specified:
        if name not in named and not takes_any:
            raise InputError(
                f"Capture(static_argnames=…) has {name!r}, which is no argument of {type(model).__name__}.forward; its "
                f"arguments are {', '.join(named)}."
            )
    return tuple(dict.fromkeys(specified))


def with_static(arguments: Arguments, names: Sequence[str], forward: Callable[..., Any]) -> Arguments:
    """Return the same call with a StaticTensor for each tensor in the arguments of these names.

    Raises InputError where one of them holds anything but tensors with values and without gradients.
    """
    if not names:
        return arguments
    args, kwargs = arguments
    positional = [_static(value, name) if name in names else value for name, value in named_args(args, forward)]
    by_name = {name: _static(value, name) if name in names else value for name, value in kwargs.items()}
    return tuple(positional), by_name


def named_args(args: Iterable[Any], forward: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return positional arguments with their names; "" for those of `*args`."""
    named = [each.name for each in inspect.signature(forward).parameters.values() if each.kind in POSITIONAL]
    args = tuple(args)
    return list(zip([*named, *[""] * len(args)], args, strict=False))


def _static(value: Any, name: str) -> Any:
    return pytree.tree_map(lambda leaf: _static_leaf(leaf, name), value)


def _static_leaf(leaf: Any, name: str) -> Any:
    if leaf is None or isinstance(leaf, StaticTensor):
        return leaf
    if not isinstance(leaf, Tensor):
        raise InputError(
            f"Capture(static_argnames=…) has {name!r}, which holds a {type(leaf).__name__} ({leaf!r}) in this call, "
            "and only tensors can be made static. Other values are constants of the graph in any case; leave it out."
        )
    if leaf.requires_grad:
        raise InputError(
            f"Capture(static_argnames=…) has {name!r}, which needs a gradient in this call, and a constant of the "
            f"graph gets none; give {name}.detach(), or leave it out of static_argnames."
        )
    if isinstance(leaf, DTensor):
        raise InputError(
            f"Capture(static_argnames=…) has {name!r}, which is a DTensor in this call; give the whole tensor, equal "
            "on every rank, as a plain tensor."
        )
    if leaf.is_meta or isinstance(leaf, FakeTensor):
        raise InputError(
            f"Capture(static_argnames=…) has {name!r}, which has no values in this call (it is a meta or fake tensor), "
            "and the graph is captured for its values; give a tensor with values."
        )
    return StaticTensor.of(leaf)
