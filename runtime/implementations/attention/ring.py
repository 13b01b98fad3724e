"""Tensors that travel around the ranks of an axis while the ranks compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.collectives.mesh_axes import Axis, count

_c10d = torch.ops._c10d_functional


class Travelling:
    """Tensors of one type on their way from the rank so many steps before this one: `arrived` waits for them.

    One uneven all-to-all, which a compiled graph and every backend know; of its parts all but one are empty.
    """

    def __init__(self, tensors: Sequence[Tensor], axis: Axis, steps: int = 1) -> None:
        self._shapes = [x.shape for x in tensors]
        flat = torch.cat([x.reshape(-1) for x in tensors])
        count("permute", axis, flat.numel() * flat.itemsize)
        sent, got = _parts(flat.numel(), axis, steps), _parts(flat.numel(), axis, -steps)
        self._flat = _c10d.all_to_all_single(flat, got, sent, axis.group)

    def arrived(self) -> list[Tensor]:
        """Return the tensors of that rank."""
        flat = _c10d.wait_tensor(self._flat)
        sizes = [shape.numel() for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(flat.split(sizes), self._shapes, strict=True)]


def _parts(size: int, axis: Axis, steps: int) -> list[int]:
    """Return the number of elements that this rank sends to each rank: all to the rank `steps` further on."""
    if isinstance(axis.rank, int):
        return [size if rank == (axis.rank + steps) % axis.size else 0 for rank in range(axis.size)]
    there = (torch.zeros(1, dtype=torch.int64) + axis.rank + steps) % axis.size
    return (torch.arange(axis.size) == there).mul(size).tolist()
