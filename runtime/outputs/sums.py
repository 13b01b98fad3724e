"""A number of which every rank has a part, and that only the user reads: its sum overlaps with the backward.

A loss is such a number. Its gradient does not depend on the sum, so that the backward begins at a rank's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.costs.space.returned import summed_in
from autopar.ir.sharding.layout import Layout, P
from autopar.ir.sharding.mesh import joined_name
from autopar.runtime.collectives.layout_moves import all_reduce_in_flight, waited_for
from autopar.runtime.collectives.mesh_axes import Axis, axes_on, join_axes


def axes_of_sums(layouts: Iterable[Layout | None], names: Sequence[str], sizes: Sequence[int]) -> set[str]:
    """Return the axes, or joined ones, over which outputs of these layouts are still to be summed."""
    found = (_axis_name(each, names, sizes) for each in layouts if each is not None)
    return {name for name in found if name}


def _axis_name(layout: Layout, names: Sequence[str], sizes: Sequence[int]) -> str:
    partial = [number for number, each in enumerate(layout) if each is P and sizes[number] > 1]
    return joined_name(names, partial)


class Sums:
    """Sums over the ranks of a mesh, whose joined axes all of them have made."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._axes: dict[Layout, Axis | None] = {}

    def begin(self, part: Tensor, layout: Layout) -> Arriving:
        """Begin to sum the parts of all ranks; of what is no sum, what all have."""
        if layout not in self._axes:
            names = self._mesh.mesh_dim_names or ()
            name = _axis_name(layout, names, self._mesh.shape)
            self._axes[layout] = axes_on(self._mesh, join_axes(self._mesh, [name]))[name] if name else None
        return Arriving(part, self._axes[layout])


class Arriving:
    """A sum on its way until `arrived` has waited for it."""

    def __init__(self, part: Tensor, axis: Axis | None) -> None:
        self._dtype = part.dtype
        self._buffer: Tensor | None = None
        if axis is None:
            self._value = part.detach()
        else:
            dtype = summed_in(part.dtype)
            self._buffer = all_reduce_in_flight(part if part.dtype == dtype else part.detach().to(dtype), axis)

    def arrived(self) -> Tensor:
        """Return the sum once it is there, in the dtype of the parts."""
        if self._buffer is not None:
            self._value, self._buffer = waited_for(self._buffer).to(self._dtype), None
        return self._value

    def __del__(self) -> None:
        if (buffer := getattr(self, "_buffer", None)) is not None:  # in use by its collective until it is waited for
            with torch._C._AutoDispatchBelowAutograd():
                torch.ops._c10d_functional.wait_tensor.default._op(buffer)
