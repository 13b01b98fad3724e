"""Collectives of parts of a tensor, one chunk of rows after the other, each on its way while the rank computes.

Legend: n ranks, M rows of each, of which a chunk has C; the whole has the rows of all ranks along one dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.collectives.axes import Axis, count
from autopar.runtime.collectives.functions import rows_in_flight, waited_for
from autopar.runtime.collectives.zigzag import parts_of, whole_of

_c10d = torch.ops._c10d_functional


def start_gather(part: Tensor, axis: Axis) -> Tensor:
    """What all ranks have, [n, *part], once it is waited for."""
    part = part.contiguous()
    count("all_gather", axis, part.numel() * part.itemsize * axis.size)
    return rows_in_flight(part.unsqueeze(0), axis)


def start_reduce_scatter(parts: Tensor, axis: Axis) -> Tensor:
    """The sum of this rank's part of [n, *part], as [1, *part], once it is waited for."""
    count("reduce_scatter", axis, parts.numel() * parts.itemsize)
    return _c10d.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group)


def arrived(buffer: Tensor) -> Tensor:
    """The result of either, once it is there."""
    return waited_for(buffer)


@dataclass(frozen=True, slots=True)
class Chunks:
    """How the rows of all ranks, along `dim` of a whole, are taken in chunks of so many rows of each rank."""

    dim: int
    rows: tuple[int, ...]
    num_ranks: int
    zigzag: bool

    def of_part(self, part: Tensor) -> Iterator[Tensor]:
        """The chunks of one rank's rows."""
        yield from part.split(self.rows, self.dim)

    def of_whole(self, whole: Tensor) -> Iterator[Tensor]:
        """The chunks of all ranks, each [n, …, C, …] and contiguous."""
        if self.zigzag:
            by_rank = torch.stack(list(parts_of(whole, self.dim, self.num_ranks, True)))
        else:
            by_rank = whole.unflatten(self.dim, (self.num_ranks, sum(self.rows))).movedim(self.dim, 0)
        for chunk in by_rank.split(self.rows, self.dim + 1):
            yield chunk.contiguous()

    def joined(self, parts: list[Tensor]) -> Tensor:
        """One rank's rows of their chunks."""
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]

    def whole(self, like: Tensor) -> Whole:
        """Room for a whole of such chunks."""
        shape = list(like.shape[1:])
        shape[self.dim : self.dim + 1] = [self.num_ranks, sum(self.rows)]
        return Whole(self, like.new_empty(shape))


class Whole:
    """A whole that is filled chunk by chunk."""

    def __init__(self, chunks: Chunks, room: Tensor) -> None:
        self._chunks, self._room, self._start = chunks, room, 0

    def add(self, chunk: Tensor) -> None:
        """The next chunk, [n, …, C, …]."""
        dim = self._chunks.dim
        end = self._start + chunk.shape[dim + 1]
        self._room.narrow(dim + 1, self._start, end - self._start).copy_(chunk.movedim(0, dim))
        self._start = end

    def made(self) -> Tensor:
        """The rows in the order of the whole."""
        dim = self._chunks.dim
        if self._chunks.zigzag:
            return whole_of(self._room.unbind(dim), dim, True)
        return self._room.flatten(dim, dim + 1)
