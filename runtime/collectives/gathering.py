"""Weights gathered from their parts: what is to be gathered, and what is on its way.

A collective overlaps with everything else until it is waited for. `start_gather` issues the gather of a bucket and
returns what is in flight; whoever needs the weights waits for it, and only then copies them out of its buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.runtime.collectives.layout_moves import rows_in_flight, waited_for
from autopar.runtime.collectives.mesh_axes import Axis, axis_of, count
from autopar.runtime.collectives.packed_messages import Part, joined, sent, unpacked
from autopar.runtime.collectives.reused_weights import ReusedBucket, ReusedWeight


@dataclass(frozen=True, slots=True)
class Recipe:
    """Instructions for gathering the weights of a bucket."""

    axis: Axis
    dims: tuple[int, ...]
    """The split dims."""
    sizes: tuple[int, ...]
    """Their whole sizes."""
    to: Sequence[torch.dtype | None] = ()
    """The dtypes to which they are cast before; none where they stay as they are."""


@dataclass(slots=True, eq=False)
class InFlight:
    """Weights of a bucket on their way: a buffer per dtype, which is no one's to read before it is waited for."""

    recipe: Recipe
    buffers: list[tuple[tuple[int, ...], list[Part], Tensor]] = field(default_factory=list)
    """Positions, how their parts are sent, and the parts of all ranks, one rank after the other."""

    def arrived(
        self, shaped: bool = True, reused: ReusedBucket | None = None, positions: Sequence[int] = ()
    ) -> tuple[Tensor, ...]:
        """Return the weights, once they are there; to be called once, as it frees the buffers.

        Without `shaped`, only their storages are as described (`unpacked`). Weights that are `reused` have these
        `positions` in their bucket.
        """
        axis, sizes = self.recipe.axis, self.recipe.sizes
        whole: list[Tensor | None] = [None] * len(sizes)
        while self.buffers:
            numbers, parts, buffer = self.buffers.pop(0)
            shapes, dims = [part.shape for part in parts], [part.dim for part in parts]
            message = waited_for(buffer)
            del buffer
            # Each weight has a storage of its own, so that it is freed by itself, and `Regather` knows it by that.
            into: list[ReusedWeight | None] | None = None
            at: list[int] = []
            if reused is not None and len(numbers) > 1 and not any(dims):
                at = [positions[i] for i in numbers]
                into = reused.filled(at)
            found = unpacked(message, shapes, dims, [sizes[i] for i in numbers], axis.size, shaped, into)
            for i, (part, each) in enumerate(zip(parts, found, strict=True)):
                if part.first and shaped and (into is None or into[i] is None):
                    found[i] = part.received(each)
            if reused is not None and into is not None and shaped and None in into:
                reused.take_over(at, found, axis.size, [shape.numel() for shape in shapes])
            for i, each in zip(numbers, found, strict=True):
                whole[i] = each
        return tuple(whole)  # type: ignore[arg-type]

    def __del__(self) -> None:
        # Nobody waited, e.g. because a call failed: a collective holds its buffers until it is waited for.
        buffers = getattr(self, "buffers", [])  # torch.compile makes some without fields
        while buffers:
            waited_for(buffers.pop()[2])


def by_dtype(tensors: Sequence[Tensor | None]) -> dict[torch.dtype, dict[int, Tensor]]:
    """Group tensors by dtype and position, without missing ones: an unused weight has a gradient on no rank."""
    groups: dict[torch.dtype, dict[int, Tensor]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault(tensor.dtype, {})[number] = tensor
    return groups


def cast(shards: Iterable[Tensor], to: Sequence[torch.dtype | None]) -> list[Tensor]:
    return [each.to(dtype or each.dtype) for each, dtype in zip(shards, to, strict=True)] if to else list(shards)


def issued(recipe: Recipe, shards: Iterable[Tensor]) -> InFlight:
    """Begin to gather weights of these parts, in one collective per dtype that they have there."""
    parts: list[Tensor | None] = [*shards]
    groups: dict[torch.dtype, list[int]] = {}
    for i, shard in enumerate(parts):
        assert shard is not None
        groups.setdefault((recipe.to[i] if recipe.to else None) or shard.dtype, []).append(i)
    found = InFlight(recipe)
    for dtype, numbers in groups.items():
        group = [each for each in map(parts.__getitem__, numbers) if each is not None]
        how = sent(group, [recipe.dims[i] for i in numbers])
        as_sent = [part.sent(each) if part.first else each for part, each in zip(how, group, strict=True)]
        flat = joined(as_sent, dtype, writes=False)
        del as_sent
        group.clear()
        for i in numbers:
            parts[i] = None  # parts that were gathered for this make room for the wholes
        count("all_gather", recipe.axis, flat.numel() * flat.itemsize * recipe.axis.size)
        found.buffers.append((tuple(numbers), how, rows_in_flight(flat, recipe.axis, recipe.axis.gathering)))
        del flat
    return found


def start_gather(
    axis: str,
    dims: tuple[int, ...],
    sizes: tuple[int, ...],
    *shards: Tensor,
    to: tuple[torch.dtype | None, ...] = (),
) -> InFlight | None:
    """Issue a gather that a later `gather_parameters` of the same weights waits for; arguments are as there.

    None where nothing moves, and in compiled graphs, whose compiler orders collectives itself.
    """
    where = axis_of(axis)
    if where.size == 1 or torch.compiler.is_compiling():
        return None
    with torch.no_grad():
        return issued(Recipe(where, dims, sizes, to), shards)
