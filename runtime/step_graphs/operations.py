"""Operations of a step, and those for which the host waits for a device, which a CUDA graph cannot replay."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import NOT_THEIRS

READS = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"))
"""Operations whose result is a value of the host."""
SIZED_BY_VALUES = frozenset(
    ("nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
)
"""Operations whose outputs have shapes that depend on values."""
FROM_HOST = frozenset(("lift_fresh",))
"""Tensors made of values of the host, which a graph would copy as they were when it was captured."""
COPIES = frozenset(("_to_copy", "copy_", "copy"))
INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
"""Operations that a mask of truth values gives as many rows as it has true ones."""

Operation = tuple[Any, ...]
"""Name of an operation, shapes, strides and dtypes of its tensors, and all other arguments."""


class RecordedOperations(TorchDispatchMode):
    """Records each operation with all that a CUDA graph would fix, and those that need the host.

    Tensors of the CPU play a device's: an operation that reads one would wait for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.of_host: list[str] = []
        """Operations that need the host, each with the line that calls it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # recorded are the operations on local tensors that it becomes
            return NotImplemented
        leaves = pytree.tree_leaves((args, kwargs or {}))
        if func._opname in READS | SIZED_BY_VALUES | FROM_HOST or _is_sized_by_a_mask(func, args):
            self.of_host.append(f"{func.name()} in {_caller()}")
        if func.namespace != "profiler":
            self.operations.append((func.name(), *map(_as_fixed, leaves)))
        result = func(*args, **(kwargs or {}))
        if func._opname in COPIES and len({x.device.type for x in (*leaves, result) if isinstance(x, Tensor)}) > 1:
            self.of_host.append(f"{func.name()} between devices in {_caller()}")
        return result


def first_difference(one: Sequence[Operation], other: Sequence[Operation]) -> str | None:
    """Return the first operation in which two steps differ, in words; None if they are the same."""
    for number in range(max(len(one), len(other))):
        here, there = (steps[number] if number < len(steps) else None for steps in (one, other))
        if here is None or there is None:
            return f"one step ends where the next calls {(here or there or ('',))[0]}"
        if here[0] != there[0]:
            return f"one step calls {here[0]} where the next calls {there[0]}"
        if here != there:
            found, then = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
            return f"{here[0]} takes {found} in one step and {then} in the next"
    return None


def _as_fixed(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    if isinstance(leaf, torch.Generator):
        # An operation sees another Python object each time.
        return "generator", leaf._cdata  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(leaf, torch.ScriptObject):  # so it does of process groups and of what reduces
        return str(leaf._type())  # pyright: ignore[reportAttributeAccessIssue]
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else repr(leaf)


def _is_sized_by_a_mask(func: Any, args: Any) -> bool:
    return func._opname in INDEXED and any(each is not None and each.dtype == torch.bool for each in args[1])


def _caller() -> str:
    """Return the innermost line outside of PyTorch and, if that is none of the user's, theirs, too."""
    lines = [_line(frame) for frame in _frames() if _package(frame) != "torch"]
    theirs = [_line(frame) for frame in _frames() if _package(frame) not in NOT_THEIRS]
    return f"{lines[0]}, from {theirs[0]}" if theirs and theirs[0] != lines[0] else lines[0]


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
