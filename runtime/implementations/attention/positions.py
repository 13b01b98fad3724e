"""Positions of queries and keys on each rank, and computations on every rank that depend on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.hops import Hop, hops_of
from autopar.ir.sharding.mesh import joined_name
from autopar.runtime.collectives.mesh_axes import Axes, Axis, axes_of, axis_of, num_parts_of
from autopar.runtime.implementations.attention.blocks import Piece
from autopar.runtime.implementations.each_rank import Ranks

QUERIES, KEYS = "s", "t"
"""The factors of positions."""


def positions(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """Return the positions of some chunks, in the order of a rank's tensor."""
    return torch.cat([torch.arange(piece.first, piece.end, device=device) for piece in pieces])


@dataclass(frozen=True, slots=True)
class FactorSplit:
    """Split of a sequence by axes, outer axis first."""

    axes: tuple[Axis, ...]
    zigzag: frozenset[str]
    """Names of the axes that zigzag-shard it: each rank has two chunks of it (see `runtime.collectives.rank_parts`)."""

    @classmethod
    def of(cls, factor: str, axes: Axes, zigzag: Axes) -> FactorSplit:
        """Build the split of a factor from the keywords of an implementation."""
        return cls(axes_of(axes.get(factor, ())), frozenset(zigzag.get(factor, ())))

    def pieces(self, size: int, ranks: Ranks) -> tuple[Piece, ...]:
        """Return the positions that the rank there has of so many, which the axes divide."""
        found = [(0, size)]
        for axis, rank in zip(self.axes, ranks, strict=True):
            part = size // axis.size
            if axis.name in self.zigzag:
                half = part // 2
                wanted = [(rank * half, half), (size - (rank + 1) * half, half)]
            else:
                wanted = [(rank * part, part)]
            found = [piece for begin, length in wanted for piece in _cut(found, begin, length)]
            size = part
        pieces, at = [], 0
        for first, length in _joined(found):
            pieces.append(Piece(first, at, length))
            at += length
        return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Split:
    """Split of queries and keys by the mesh."""

    queries: FactorSplit
    keys: FactorSplit
    ring: Axis | None
    """The axes that split both, as one."""
    merged: tuple[Axis, ...]
    """Axes that split keys alone."""
    num_keys: int
    reach: int | None = None
    """Number of positions back that a query sees, with none ahead; None is unlimited."""

    @classmethod
    def of(cls, axes: Axes, zigzag: Axes, num_keys: int, reach: int | None = None) -> Split:
        """Build the split of queries and keys from the keywords of an implementation."""
        ring = tuple(name for name in axes.get(KEYS, ()) if name in axes.get(QUERIES, ()))
        return cls(
            FactorSplit.of(QUERIES, axes, zigzag),
            FactorSplit.of(KEYS, axes, zigzag),
            axis_of(joined_name(ring, range(len(ring)))) if axes_of(ring) else None,
            axes_of([name for name in axes.get(KEYS, ()) if name not in ring]),
            num_keys,
            reach,
        )

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes that locate a rank: those of queries, then those that split keys alone."""
        return (*self.queries.axes, *self.merged)

    @property
    def num_steps(self) -> int:
        """Number of steps in which a rank has keys; the first has its own."""
        return 1 + len(self.hops)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Hops by which keys of other ranks arrive."""
        if self.ring is None:
            return ()
        alike = [axis.name for axis in self.queries.axes] == [axis.name for axis in self.keys.axes]
        part = self.num_keys // num_parts_of(self.keys.axes)
        is_zigzag = [axis.name in self.queries.zigzag for axis in self.queries.axes]
        reach = self.reach if alike and len(set(is_zigzag)) == 1 else None
        return hops_of(reach, part, self.ring.size, any(is_zigzag))

    def keys_at(self, ranks: Ranks, step: int) -> tuple[Piece, ...]:
        """Return the keys that a rank has after so many hops."""
        hop = self.hops[step - 1] if step else None
        stands = {axis.name: rank for axis, rank in zip(self.axes, ranks, strict=True)}
        around = [axis for axis in self.keys.axes if axis not in self.merged]
        place = -hop.source if hop is not None else 0
        for axis in reversed(around):  # the rank that these keys came from, outer axis first
            place += stands[axis.name]
            stands[axis.name], place = place % axis.size, place // axis.size
        pieces = self.keys.pieces(self.num_keys, tuple(stands[axis.name] for axis in self.keys.axes))
        return pieces if hop is None else _pieces_from(pieces, hop.first, hop.size)

    def keys_unmoved(self, ranks: Ranks) -> tuple[Piece, ...]:
        """Return the keys of a tensor that does not travel, and so is whole on the axes of the ring."""
        stands = {axis.name: rank for axis, rank in zip(self.axes, ranks, strict=True)}
        return FactorSplit(self.merged, self.keys.zigzag).pieces(
            self.num_keys, tuple(stands[axis.name] for axis in self.merged)
        )


def _pieces_from(pieces: Sequence[Piece], begin: int, length: int) -> tuple[Piece, ...]:
    """Return so many of a rank's positions from a place on, and where they lie in a tensor of these alone."""
    found = _cut([(piece.first, piece.size) for piece in pieces], begin, length)
    return tuple(Piece(first, sum(size for _, size in found[:at]), size) for at, (first, size) in enumerate(found))


def _cut(pieces: Sequence[tuple[int, int]], begin: int, length: int) -> list[tuple[int, int]]:
    """Return the `length` places from place `begin` on in a row of (first position, size)."""
    found, at, end = [], 0, begin + length
    for first, size in pieces:
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            found.append((first + low - at, high - low))
        at += size
    return found


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, size in pieces:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((first, size))
    return found
