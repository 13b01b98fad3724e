"""Computation that depends on the rank by control flow: once on a real rank, once for each simulated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, local_tensor_mode

from autopar.runtime.collectives.mesh_axes import Axis, on_rank

Ranks = tuple[int, ...]
"""Coordinates of a rank on some axes."""


def on_each_rank(
    compute: Callable[..., Sequence[Tensor]], axes: Sequence[Axis], tensors: Sequence[Tensor | None]
) -> Sequence[Any]:
    """Return `compute(ranks, *tensors)` for this rank's positions on the axes; for each rank if simulated.

    The computation depends on the rank by control flow, which a simulation cannot follow by itself.
    """
    mode = local_tensor_mode() if not torch.compiler.is_compiling() else None
    if mode is None:
        return compute(tuple(axis.rank for axis in axes), *tensors)
    with mode.disable():
        results = {}
        for rank in sorted(mode.ranks):
            stand = tuple(on_rank(axis.rank, rank) for axis in axes)
            own = [x._local_tensors[rank] if isinstance(x, LocalTensor) else x for x in tensors]
            results[rank] = compute(stand, *own)
        some = next(iter(results.values()))
        return [LocalTensor({rank: each[i] for rank, each in results.items()}) for i in range(len(some))]
