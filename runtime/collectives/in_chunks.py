"""Collectives of parts of a tensor, one chunk of rows after the other, each on its way while the rank computes.

Legend: n ranks, M rows of each, of which a chunk has C; the whole has the rows of all ranks along one dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.runtime.collectives.layout_moves import rows_in_flight, waited_for
from autopar.runtime.collectives.mesh_axes import Axis, count
from autopar.runtime.collectives.rank_parts import by_rank, whole_of

_c10d = torch.ops._c10d_functional


def start_gather(part: Tensor, axis: Axis) -> Tensor:
    """Start an all-gather of the ranks' parts; the result, once waited for, is [n, *part]."""
    part = part.contiguous()
    count("all_gather", axis, part.numel() * part.itemsize * axis.size)
    return rows_in_flight(part.unsqueeze(0), axis)


def start_reduce_scatter(parts: Tensor, axis: Axis) -> Tensor:
    """Return the sum of this rank's part of [n, *part], as [1, *part], once it is waited for."""
    count("reduce_scatter", axis, parts.numel() * parts.itemsize)
    return _c10d.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group)


def arrived(buffer: Tensor) -> Tensor:
    """Return the result of either, once it is there."""
    return waited_for(buffer)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of a tensor that has the rows of all ranks along `dim`; a rank's part is cut along `along`.

    A chunk of samples (`along` is another dim than `dim`) has all rows of these samples, in the order of the whole. A
    chunk of rows has the rows of one rank after the other, [n, …, C, …].
    """

    dim: int
    along: int
    sizes: tuple[int, ...]
    """Sizes of the chunks, along the dim that is cut."""
    num_ranks: int
    zigzag: bool

    @property
    def of_samples(self) -> bool:
        """True if every chunk has all rows, also if there is one chunk only."""
        return self.along != self.dim or len(self.sizes) == 1

    def in_one(self) -> Chunks:
        """Return the same rows in one chunk."""
        return replace(self, sizes=(sum(self.sizes),))

    def of_part(self, part: Tensor) -> Iterator[Tensor]:
        """Yield the chunks of one rank's part."""
        yield from part.split(self.sizes, self.along)

    def of_whole(self, whole: Tensor) -> Iterator[Tensor]:
        """Yield the chunks of a whole."""
        if self.of_samples:
            yield from whole.split(self.sizes, self.along) if len(self.sizes) > 1 else (whole,)
            return
        for chunk in self._rows_by_rank(whole).split(self.sizes, self.dim + 1):
            yield chunk.contiguous()

    def of_ranks(self, parts: Tensor) -> Tensor:
        """Return a chunk from what all ranks have of it, [n, *part]."""
        return whole_of(parts, self.dim, self.zigzag) if self.of_samples else parts

    def by_rank(self, chunk: Tensor) -> Tensor:
        """Return the part of a chunk for each rank, [n, *part]."""
        return self._rows_by_rank(chunk) if self.of_samples else chunk

    def _rows_by_rank(self, whole: Tensor) -> Tensor:
        """Return the rows of each rank, [n, …, M, …]."""
        return by_rank(whole, self.dim, self.num_ranks, self.zigzag)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Return one rank's part of its chunks."""
        return torch.cat(parts, self.along) if len(parts) > 1 else parts[0]

    def whole(self) -> Whole:
        """Return a whole without chunks yet."""
        return Whole(self)


class Whole:
    """A whole that is put together chunk by chunk."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._found: list[Tensor] = []

    def add(self, chunk: Tensor) -> None:
        """Add the next chunk."""
        self._found.append(chunk)

    def made(self) -> Tensor:
        """Return all chunks in the order of the whole."""
        chunks, found = self._chunks, self._found
        if len(found) == 1:
            return found[0]
        if chunks.of_samples:
            return torch.cat(found, chunks.along)
        return whole_of(torch.cat(found, chunks.dim + 1), chunks.dim, chunks.zigzag)
