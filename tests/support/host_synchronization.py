"""The operations of a step, and those for which the host would wait for a device, which a CUDA graph cannot replay."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "allclose"))
"""Operations whose result is a value of the host."""
SIZED_BY_VALUES = frozenset(
    ("nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
)
"""Operations whose outputs have shapes that depend on values."""
FROM_HOST = frozenset(("lift_fresh",))
"""Tensors made of values of the host, which a graph would copy as they were when it was captured."""


class RecordedOperations(TorchDispatchMode):
    """Records each operation with all that a CUDA graph would fix, and those that need the host.

    Tensors of the CPU play a device's: what reads one would wait for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        """Names, shapes, strides and dtypes of tensors, and all other arguments."""
        self.of_host: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # recorded are the operations on local tensors that it becomes
            return NotImplemented
        if func._opname in READS | SIZED_BY_VALUES | FROM_HOST or _is_sized_by_a_mask(func, args):
            self.of_host.append(f"{func.name()} in {_caller()}")
        leaves = pytree.tree_leaves((args, kwargs or {}))
        self.operations.append((func.name(), *map(_as_fixed, leaves)))
        return func(*args, **(kwargs or {}))


def _as_fixed(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else repr(leaf)


def _is_sized_by_a_mask(func: Any, args: Any) -> bool:
    if func._opname not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(each is not None and each.dtype == torch.bool for each in args[1])


def _caller() -> str:
    frames = [each for each in traceback.extract_stack() if "/torch/" not in each.filename]
    *_, frame = (each for each in frames if each.filename != __file__)
    return f"{frame.filename}:{frame.lineno}"
