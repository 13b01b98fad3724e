"""The cache of keys and values as a state of fixed sizes with a layout: its bytes, its parts, its possible layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.ir.program.operators.attention.cached import WRITE_CACHE
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import FACTOR, NODE, Annotation
from autopar.ir.sharding.layout import I, Layout, S
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.module.parameters import placements_of

NAME = "autopar_cache"
"""Argument that holds it, which a forward takes in addition to the model's own."""
DIMS: Mapping[str, int] = {"a0": 0, "h": 1, "t": 2}
"""Factors of the rule of a write → the dims of a cache that they are: samples, heads, positions."""
WORDS = ("samples", "heads", "positions")


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Keys and values of all layers, each (batch, heads, length, features)."""

    layers: tuple[tuple[int, int], ...]
    """Heads and features of each."""
    batch: int
    length: int
    dtype: torch.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each layer's keys, and also of its values."""
        return tuple((self.batch, heads, self.length, features) for heads, features in self.layers)

    def num_bytes(self, layout: Layout, sizes: Sequence[int]) -> int:
        """Return the bytes on one device."""
        elements = sum(math.prod(layout.local_shape(shape, sizes)) for shape in self.shapes)
        return 2 * elements * self.dtype.itemsize

    def layouts(self, mesh: Mesh) -> Iterator[Layout]:
        """Yield every layout in which each mesh axis splits samples, heads, positions, or nothing."""
        options = [(I, *map(S, DIMS.values())) if size > 1 else (I,) for size in mesh.sizes]
        for each in itertools.product(*options):
            layout = Layout(each)
            if all(layout.divides(shape, mesh.sizes) for shape in self.shapes):
                yield layout

    def whole(self) -> list[Tensor]:
        """Return the tensors of the shapes of one side, without memory."""
        return [torch.empty(shape, dtype=self.dtype, device="meta") for shape in self.shapes]

    def parts(self, layout: Layout, mesh: DeviceMesh) -> list[Tensor]:
        """Return this rank's parts of one side, of zeros, since unwritten positions are multiplied by 0."""
        local = [layout.local_shape(shape, mesh.shape) for shape in self.shapes]
        return [torch.zeros(shape, dtype=self.dtype, device=mesh.device_type) for shape in local]


def as_dtensors(parts: Sequence[Tensor], layout: Layout, mesh: DeviceMesh) -> list[Tensor]:
    """Return the parts of a layout as the whole that they are of."""
    return [DTensor.from_local(part, mesh, placements_of(layout), run_check=False) for part in parts]


def specified_layout(program: Program, specified: Sequence[Annotation], mesh: Mesh) -> Layout | None:
    """Return the layout of the cache that annotations of its writes require; None if there are none."""
    writes = {f"{NODE}{node.name}" for node in program.graph.nodes if node.target is WRITE_CACHE}
    found = [dict(each.axes) for each in specified if each.pattern in writes]
    if not found:
        return None
    factors = [str(found[0].get(axis) or "").removeprefix(FACTOR) for axis in mesh.names]
    return Layout(S(DIMS[factor]) if factor in DIMS else I for factor in factors)


def described(layout: Layout, mesh: Mesh) -> str:
    """Describe which dim of the cache each axis shards, as "heads over tp"."""
    found = [f"{WORDS[each.dim]} over {axis}" for axis, each in zip(mesh.names, layout, strict=True) if each.is_split]
    return ", ".join(found) or "whole on every device"
