"""Outputs of a padded call, cut back to what an unpadded one returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.errors import InputError
from autopar.ir.program.program import Program, TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.runtime.lengths.inputs import Sizes

Dims = tuple[tuple[int, int], ...]
"""(dim, how much larger it is than what it counts), of an output."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Dims of an output that count positions, and dims that count samples."""

    positions: Dims = ()
    samples: Dims = ()


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of a call: its positions, and the samples of each part of its batch, before and after."""

    length: int | None
    padded_length: int | None
    samples: tuple[int, ...]
    padded_samples: int
    lengths: tuple[int | None, ...] = ()
    """The positions that each part had; `length` is the largest."""

    def of_part(self, number: int) -> Padding:
        """Return the padding of one part: it has rows of its own samples, of its own positions."""
        return replace(self, length=self.lengths[number], samples=(self.samples[number],))

    @property
    def of_length(self) -> bool:
        return self.length != self.padded_length

    @property
    def of_samples(self) -> bool:
        return any(each != self.padded_samples for each in self.samples)


def counted_dims(program: Program, sizes: Sizes, longer: Program | None, more: Program | None) -> tuple[Counted, ...]:
    """Return which dims of a program's outputs count positions and samples.

    They are found by comparison with the same program for more positions, and for more samples. `sizes` are those of
    `program`. Raises InputError if an output cannot be cut.
    """
    return tuple(
        Counted(
            _dims(program, longer, number, sizes.length, "positions"),
            _dims(program, more, number, sizes.batch, "samples"),
        )
        for number in range(program.num_outputs)
    )


def _dims(program: Program, larger: Program | None, number: int, size: int | None, what: str) -> Dims:
    if larger is None or size is None:
        return ()
    value, other = (each.output[each.num_sent + number] for each in (program, larger))
    if not isinstance(value, fx.Node) or not isinstance(other, fx.Node):
        if value != other:
            raise InputError(
                f"output {number} is the number {value} or {other}, as there are more {what} with padding; return what "
                "does not depend on the size of the inputs, or give Run(buckets='none')."
            )
        return ()
    info, its = value.meta["tensor"], other.meta["tensor"]
    assert isinstance(info, TensorInfo) and isinstance(its, TensorInfo)
    found = []
    for dim, (before, after) in enumerate(zip(info.shape, its.shape, strict=True)):
        if before == after:
            continue
        if after - before != _size_of(larger, program, size):
            raise InputError(
                f"dim {dim} of output {number} has {before} elements for {size} {what}, so that padding lies between "
                "them; return a tensor with a dim of its own for samples and for positions, or give "
                "Run(buckets='none')."
            )
        found.append((dim, before - size))
    return tuple(found)


def _size_of(larger: Program, program: Program, size: int) -> int:
    """Return by how much the inputs grow in the larger program; all grown dims must grow alike."""
    grown = [
        after - before
        for one, other in zip(program.input_values, larger.input_values, strict=True)
        if isinstance(one, TensorInfo) and isinstance(other, TensorInfo)
        for before, after in zip(one.shape, other.shape, strict=True)
        if before != after
    ]
    assert len(set(grown)) == 1, f"inputs of {size} grow by {grown}"
    return grown[0]


def cut(value: Tensor, counted: Counted, padding: Padding) -> Tensor:
    """Return a whole output without what was padded."""
    if padding.of_length and padding.length is not None:
        for dim, more in counted.positions:
            value = value.narrow(dim, 0, padding.length + more)
    if padding.of_samples:
        for dim, more in counted.samples:
            value = _rows(value, dim, more, padding)
    return value


def _rows(value: Tensor, dim: int, more: int, padding: Padding) -> Tensor:
    if len(padding.samples) == 1:
        return value.narrow(dim, 0, padding.samples[0] + more)
    if more:
        raise InputError(
            f"an output has {more} rows more than samples, and the batch is padded on several ranks; return a tensor "
            "with a row for each sample, or give the whole batch on every rank."
        )
    begins = accumulate(chain([0], repeat(padding.padded_samples, len(padding.samples) - 1)))
    kept = [begin + row for begin, count in zip(begins, padding.samples, strict=True) for row in range(count)]
    return value.index_select(dim, torch.tensor(kept, device=value.device))


def cut_part(
    value: Tensor, layout: Layout, mesh: DeviceMesh, parts: Sequence[str], counted: Counted, padding: Padding
) -> DTensor:
    """Return a rank's part of an output, as a DTensor without what was padded.

    `parts` are the axes over which the batch is given in parts. Axes that split a cut dim are gathered, unless they
    split samples as given.
    """
    placements: list[Placement] = [Shard(each.dim) if each.is_split else Replicate() for each in layout]
    names = mesh.mesh_dim_names or ()
    positions = [dim for dim, _ in counted.positions] if padding.of_length else []
    samples = [dim for dim, _ in counted.samples] if padding.of_samples else []
    as_given = tuple(names[axis] for axis in layout.axes_of(0)) == tuple(parts) != ()
    if samples == [0] and counted.samples == ((0, 0),) and as_given and len(set(padding.samples)) == 1:
        value, samples = value.narrow(0, 0, padding.samples[0]), []
    gathered = [
        Replicate() if isinstance(each, Shard) and each.dim in (*positions, *samples) else each for each in placements
    ]
    if gathered != placements:
        found = DTensor.from_local(value, mesh, placements, run_check=False).redistribute(placements=gathered)
        value = found.to_local()
    left = Counted(counted.positions, counted.samples if samples else ())
    return DTensor.from_local(cut(value, left, padding), mesh, gathered, run_check=False)
