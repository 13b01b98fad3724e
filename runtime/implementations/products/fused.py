"""Products fused with their collective in torch's kernels over the symmetric memory of a group of GPUs.

GPUs read each other's rows, or write each other's parts, by copies overlapped with the matmul of rows that are there
already, rank by rank, without NCCL and its use of multiprocessors (`torch.ops.symm_mem`, PyTorch's async tensor
parallelism). They take rows of one rank after the other in the order of the whole, so that zigzag parts are not for
them.

A group has symmetric memory where it was enabled, as for the passes of torch.compile:

    torch.distributed._symmetric_memory.enable_symm_mem_for_group(mesh.get_group("tp").group_name)

Legend: M rows of one rank, n·M of all, K features, O columns; dims before the rows are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

from autopar.runtime.collectives.mesh_axes import Axis, count

FUSED_ON = ("cuda",)
"""Types of devices that torch has the kernels for."""


def is_fused(x: Tensor, axis: Axis, zigzag: bool) -> bool:
    """Return whether a product of `x` and its collective over the axis are one kernel; the same on all its ranks."""
    group: Any = axis.group
    return x.device.type in FUSED_ON and axis.size > 1 and not zigzag and is_symm_mem_enabled_for_group(group)


def gather_and_multiply(
    x: Tensor, matrices: Sequence[Tensor], axis: Axis, dim: int, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather x [M, K] along `dim` to [n·M, K] and multiply by matrices [K, O]; return it, if saved, and [n·M, O] of
    each.
    """
    count("all_gather", axis, x.numel() * x.itemsize * axis.size)
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, list(matrices), dim, axis.group, return_A=keep)
    # They lie in memory as their ranks come one after the other, which a graph of contiguous products does not expect.
    return whole, [product.contiguous() for product in products]


def multiply_and_scatter(x: Tensor, matrix: Tensor, axis: Axis, dim: int) -> Tensor:
    """Multiply x [n·M, K] by matrix [K, O], and return this rank's rows along `dim` of the sum over ranks [M, O]."""
    count("reduce_scatter", axis, x.numel() // x.shape[-1] * matrix.shape[1] * x.itemsize)
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, axis.group).contiguous()
