"""Tensors that are whole or DTensors alike: a rank's own part, and matrices made whole, or cut as another is.

A matrix that a plan stores in parts is a DTensor; on each axis of its mesh it is split in one of its dims, or whole.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the local tensor of a DTensor, sharing its memory, or all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor's elements in the order in which they, or those of another one of its shape, lie in memory.

    They share its memory where it lies in that order without gaps.
    """
    strides = (tensor if like is None else like).stride()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -strides[dim])).reshape(-1)


def whole(matrix: torch.Tensor) -> torch.Tensor:
    """Gather a matrix on every rank that has a part of it."""
    return matrix.full_tensor() if isinstance(matrix, DTensor) else matrix


def as_stored(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole matrix that every rank has, in the parts of `like`; nothing is communicated."""
    if not isinstance(like, DTensor):
        return matrix
    return placed(matrix, like, like.placements)


def placed(tensor: torch.Tensor, like: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Return a whole tensor that every rank has, in parts on the mesh of `like`; nothing is communicated."""
    mesh = like.device_mesh
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=placements)


def split_dim(placement: Placement) -> int | None:
    """Return the dim that a placement of a matrix splits, None where it is whole."""
    return placement.dim if isinstance(placement, Shard) else None
