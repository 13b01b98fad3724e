"""Constant masks, repeats and split points while a model is traced: they become the indices that they stand for.

How many elements `x[:, mask]` has depends on the mask's values, which a trace does not have. A mask that is a constant
(a tensor which the model keeps as an attribute, no buffer and no input) has its values at hand: the index is worked
out once, and the graph has one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.passes.refused_calls import DEPENDS, NeedsValuesError


class ConstantIndices(TorchFunctionMode):
    """Answers calls whose shapes depend on the values of constants by calls whose shapes do not."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            func in OF_MASKS
            and any(map(_is_constant, args))
            and all(_is_constant(x) or not isinstance(x, Tensor) for x in args)
        ):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        answer = ANSWERS.get(func)
        if answer is not None:
            args, kwargs = answer(args, dict(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except PendingUnbackedSymbolNotFound as error:
            name = getattr(func, "__name__", str(func))
            raise NeedsValuesError(f"torch.{name} in the model {DEPENDS}") from error


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _indexed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Replace constant masks in `x[…]` by the positions where they are true, one index for each of their dims."""
    tensor, index, *rest = args
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        mask: Any = _real(part) if isinstance(part, list) and part and isinstance(part[0], bool) else part
        places = _places(mask) if _is_constant(mask) and mask.dtype is torch.bool and mask.ndim else (part,)
        parts += places
    changed = len(parts) > 1 or (parts and parts[0] is not index)
    return (tensor, tuple(parts) if changed else index, *rest), kwargs


def _repeated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Replace constant repeats by repeats with a stated output size."""
    named = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    repeats: Any = named.get("repeats")
    if _is_constant(repeats) and named.get("dim") is not None and kwargs.get("output_size") is None:
        with _disable_current_modes():
            # One number for all elements is as good as a plain number.
            count = int(repeats.sum()) if repeats.numel() > 1 else int(repeats) * named["input"].shape[named["dim"]]
        return args, {**kwargs, "output_size": count}
    return args, kwargs


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Replace constant split points by plain numbers."""
    with _disable_current_modes():
        plain = lambda value: value.tolist() if _is_constant(value) else value  # noqa: E731
        return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}


def _is_constant(value: Any) -> bool:
    """Return whether a value is a plain tensor with data, neither fake nor on the meta device."""
    return type(value) is Tensor and not isinstance(value, FakeTensor) and not value.is_meta


def _real(values: list[bool]) -> Tensor:
    with _disable_current_modes():
        return torch.tensor(values)


def _places(mask: Tensor) -> tuple[Tensor, ...]:
    with _disable_current_modes():
        return mask.nonzero(as_tuple=True)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
CONNECTIVES = ("and", "or", "xor")
OF_MASKS = frozenset(
    (
        *(getattr(Tensor, f"__{name}__") for name in ("invert", *CONNECTIVES, *COMPARISONS)),
        *(getattr(owner, name) for owner in (torch, Tensor) for name in COMPARISONS),
        *(getattr(owner, f"logical_{name}") for owner in (torch, Tensor) for name in ("not", *CONNECTIVES)),
    )
)
"""Functions that build masks; applied to constants alone, they give a constant."""

ANSWERS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Call]] = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _indexed,
    torch.repeat_interleave: _repeated,
    Tensor.repeat_interleave: _repeated,
    torch.tensor_split: _split,
    Tensor.tensor_split: _split,
}
