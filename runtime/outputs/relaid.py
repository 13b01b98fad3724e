"""A local tensor in another layout, without autograd: gathered from the inner axis outwards, then sliced."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autopar.ir.sharding.layout import Layout
from autopar.runtime.collectives.layout_moves import local_slice, raw_all_gather
from autopar.runtime.collectives.mesh_axes import Axis


def relaid(x: Tensor, source: Layout, target: Layout, axes: Sequence[Axis]) -> Tensor:
    """Return this rank's part in `target` of a tensor that lies in `source`; both are of I and S, and divide evenly."""
    stay = [_keeps_parts(number, source, target) for number in range(len(axes))]
    for number, axis in reversed(list(enumerate(axes))):
        if source[number].is_split and not stay[number]:
            dim = source[number].dim
            x = raw_all_gather(x, axis, dim, x.shape[dim] * axis.size)
    for number, axis in enumerate(axes):
        if target[number].is_split and not stay[number]:
            x = local_slice(x, axis, target[number].dim)
    return x


def _keeps_parts(number: int, source: Layout, target: Layout) -> bool:
    """Return whether an axis splits the same parts in both layouts: no outer axis splits its dim otherwise."""
    if source[number] != target[number]:
        return False
    dim = source[number].dim
    pairs = zip(source[:number], target[:number], strict=True)
    return all(a == b for a, b in pairs if (a.is_split and a.dim == dim) or (b.is_split and b.dim == dim))
