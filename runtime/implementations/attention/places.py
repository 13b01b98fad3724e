"""Which positions of a sequence a rank has, and what is computed from that on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, local_tensor_mode

from autopar.runtime.collectives.axes import Axis
from autopar.runtime.implementations.attention.blocks import Piece

Ranks = tuple[int, ...]
"""Where a rank stands on each of some axes."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """How axes, outer first, split a sequence."""

    axes: tuple[Axis, ...]
    zigzag: bool
    """Each rank has two pieces of it (see `runtime.collectives.zigzag`), not one."""

    def pieces(self, size: int, ranks: Ranks) -> tuple[Piece, ...]:
        """The positions that the rank there has of so many, which the axes divide."""
        found = [(0, size)]
        for axis, rank in zip(self.axes, ranks, strict=True):
            part = size // axis.size
            if self.zigzag:
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


def _cut(pieces: Sequence[tuple[int, int]], begin: int, length: int) -> list[tuple[int, int]]:
    """What lies from place `begin` on in a row of (first position, size)."""
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


def on_each_rank(
    compute: Callable[..., Sequence[Tensor]], axes: Sequence[Axis], tensors: Sequence[Tensor | None]
) -> Sequence[Any]:
    """`compute(ranks, *tensors)`, where `ranks` is where this rank stands on the axes; where ranks are simulated, each.

    What is computed depends on the rank by its control flow, which a simulation cannot follow by itself.
    """
    mode = local_tensor_mode() if not torch.compiler.is_compiling() else None
    if mode is None:
        return compute(tuple(axis.rank for axis in axes), *tensors)
    with mode.disable():
        results = {}
        for rank in sorted(mode.ranks):
            stand = tuple(_of_rank(axis.rank, rank) for axis in axes)
            own = [x._local_tensors[rank] if isinstance(x, LocalTensor) else x for x in tensors]
            results[rank] = compute(stand, *own)
        some = next(iter(results.values()))
        return [LocalTensor({rank: each[i] for rank, each in results.items()}) for i in range(len(some))]


def _of_rank(number: Any, rank: int) -> int:
    """A number that each simulated rank has of its own."""
    ints = getattr(getattr(number, "node", None), "_local_ints", None)
    return int(number) if ints is None else ints[rank]
