"""The batch in parts: `inputs="local"` says that every rank is called with its own part of it.

A part is what a rank has along dim 0 of every input tensor that has the batch's size there, which is that of the first
input tensor with dims. Parts are of equal size, and lie one behind the other in the order of the ranks over the axes
that they belong to; ranks that differ on other axes alone give the same part. Other inputs are equal on every rank. A
part becomes a DTensor: what arrives split is planned for as such. A tensor whose dim 0 has that size by chance is given
as a DTensor that is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import I, Layout, S
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.module.batches import batch_size
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.loss_scale import with_scaled_gradient


@dataclass(frozen=True, slots=True)
class Given:
    """Convention of calls: axes over which the batch is given in parts, and whether calls compare their values."""

    axes: tuple[str, ...] = ()
    check: bool | None = None
    """True: in every call; False: in none; None: in the first calls."""
    static: tuple[str, ...] = ()
    """Arguments of forward whose values are constants of the graph."""


GIVEN_WHOLE = Given()


def parts_as_dtensors(arguments: Arguments, mesh: DeviceMesh, axes: Sequence[str], averages: bool) -> Arguments:
    """Return the same call with a DTensor of the whole batch for each part.

    `averages`: the loss of the step is the mean of the ranks' losses, and a part gets the gradient of its rank's loss.
    """
    if not axes:
        return arguments
    names = mesh.mesh_dim_names or ()
    scale = math.prod(mesh.size(names.index(axis)) for axis in axes)
    placements = [Shard(0) if name in axes else Replicate() for name in names]
    leaves, spec = pytree.tree_flatten(arguments)
    wrapped = [
        _as_dtensor(leaf, mesh, placements, scale if averages else None) if is_part else leaf
        for leaf, is_part in zip(leaves, _are_parts(leaves, arguments), strict=True)
    ]
    return pytree.tree_unflatten(wrapped, spec)


def _as_dtensor(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], scale: int | None) -> DTensor:
    scaled = with_scaled_gradient(part, scale) if part.requires_grad and torch.is_grad_enabled() else part
    return DTensor.from_local(scaled, mesh, placements, run_check=False)


def whole_batch(arguments: Arguments, num_parts: int) -> Arguments:
    """Return the same call with the shapes of the whole batch, without memory."""
    if num_parts == 1:
        return arguments

    def whole(x: Tensor) -> Tensor:
        with FakeTensorMode():
            shape = (x.shape[0] * num_parts, *x.shape[1:])
            return torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    leaves, spec = pytree.tree_flatten(arguments)
    are_parts = _are_parts(leaves, arguments)
    return pytree.tree_unflatten(
        [whole(x) if is_part else x for x, is_part in zip(leaves, are_parts, strict=True)], spec
    )


def layouts_of_parts(program: Program, arguments: Arguments, mesh: Mesh, axes: Sequence[str]) -> dict[str, Layout]:
    """Return the placeholder → the layout in which it arrives, for the inputs that are parts."""
    if not axes:
        return {}
    layout = Layout(S(0) if name in axes else I for name in mesh.names)
    are_parts = _are_parts(pytree.tree_leaves(arguments), arguments)
    return {name: layout for name, is_part in zip(program.inputs, are_parts, strict=True) if name and is_part}


def _are_parts(leaves: Sequence[Any], arguments: Arguments) -> list[bool]:
    size = batch_size(arguments)
    plain = [isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.ndim > 0 for leaf in leaves]
    return [is_plain and leaf.shape[0] == size for leaf, is_plain in zip(leaves, plain, strict=True)]
