"""A subspace of the gradients of a matrix that may be stored in parts: found, projected into, projected back from.

Shapes are those of a tall matrix G [b, s], b ≥ s; a wide one is its transpose. A basis Q is [s, r], what is projected
[b, r]. An axis of the mesh that splits

    b   splits what is projected likewise, and Q by r, which is gathered where it is used
    s   splits Q by its rows, and what is projected by r: sums over s are reduce-scattered, and gathered to go back
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar.optim.sharded_tensors import placed, split_dim, whole

Placements = tuple[Placement, ...]


def tall(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix, transposed where it has more columns than rows."""
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()


def basis_of(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the first `rank` right singular vectors of a tall matrix, as columns; gathers the matrix.

    They are sharded as the matrix, in the order of singular values, each with its largest entry positive.
    """
    every = whole(gradient)
    vectors = torch.linalg.svd(every.float(), full_matrices=False).Vh[:rank].t()
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors = (vectors * torch.where(largest < 0, -1.0, 1.0)).to(gradient.dtype).contiguous()
    if not isinstance(gradient, DTensor):
        return vectors
    return placed(vectors, gradient, _tall_placements(gradient, long=Shard(1), short=Shard(0)))


def as_used(basis: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the basis as parts of the tall matrix `like` are multiplied by it."""
    if not isinstance(like, DTensor) or not isinstance(basis, DTensor):
        return basis
    return basis.redistribute(placements=_tall_placements(like, long=Replicate(), short=Shard(0)))


def projected(gradient: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return G Q: [b, s] times a basis as it is used, [s, r], to [b, r]."""
    if not isinstance(gradient, DTensor) or not isinstance(basis, DTensor):
        return gradient @ basis
    product = gradient.to_local() @ basis.to_local()
    shape = torch.Size((gradient.shape[0], basis.shape[1]))
    summed = DTensor.from_local(
        product,
        gradient.device_mesh,
        _tall_placements(gradient, long=Shard(0), short=Partial()),
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )
    return summed.redistribute(placements=_tall_placements(gradient, long=Shard(0), short=Shard(1)))


def projected_back(inside: torch.Tensor, basis: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return N Qᵀ: [b, r] times a basis as it is used, [s, r], to [b, s], in the parts of the tall matrix `like`."""
    if not isinstance(like, DTensor) or not isinstance(inside, DTensor) or not isinstance(basis, DTensor):
        return inside @ basis.t()
    rows = inside.redistribute(placements=_tall_placements(like, long=Shard(0), short=Replicate())).to_local()
    product = rows @ basis.to_local().t()
    return DTensor.from_local(
        product, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=(like.shape[1], 1)
    )


def _tall_placements(matrix: DTensor, long: Placement, short: Placement) -> Placements:
    """Return a placement for every axis: by which dim of a tall matrix it splits, whole where it splits none."""
    kinds = {0: long, 1: short, None: Replicate()}
    return tuple(kinds[split_dim(placement)] for placement in matrix.placements)
