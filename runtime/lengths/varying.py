"""Calls of any size brought to buckets, and what is remembered for their outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.lengths.inputs import Arguments, Sizes, empty, padded, roles_of, sizes_of
from autopar.runtime.lengths.length_buckets import Buckets, unit_of
from autopar.runtime.lengths.outputs import Counted, Padding

Exchange = Callable[[Sizes], Sequence[Sizes]]
"""This rank's sizes → those of all ranks, in the order of the mesh; of one rank, where all have the same."""


class Varying:
    """The buckets of one module on a mesh, the largest batch that it has seen, and what its outputs count."""

    def __init__(self, buckets: Buckets, mesh: Mesh, parts: Sequence[str]) -> None:
        """`parts` are the axes over which ranks give different parts of the batch."""
        self.buckets, self.parts = buckets, tuple(parts)
        self._unit = unit_of(mesh)
        self._givers = _first_of_each_part(mesh, parts)
        self._largest = 0
        self.counted: dict[Hashable, tuple[Counted, ...]] = {}
        """Executable or pipeline of a kind of inputs → the meaning of its outputs' dims."""

    def fitted(self, arguments: Arguments, exchange: Exchange) -> tuple[Arguments, Padding]:
        """Return the same call in the sizes of a bucket, alike on all ranks; InputError where there is none."""
        roles = roles_of(arguments, self.buckets)
        mine = sizes_of(arguments, roles)
        known = exchange(mine)
        parts = [known[number] for number in self._givers] if len(known) > 1 else [known[0]] * len(self._givers)
        lengths = tuple(each.length for each in parts)
        length = max((each for each in lengths if each is not None), default=None)
        target = None if length is None else self.buckets.length_for(length, self._unit)
        samples = tuple(each.batch or 0 for each in parts)
        batch = self.buckets.batch_for(max(samples), self._largest)
        self._largest = max(self._largest, batch)
        goal = Sizes(target, mine.batch if self.buckets.batches is None else batch)
        if self.buckets.batches is None:
            batch, samples = max(samples), (max(samples),) * len(samples)
        padding = Padding(length, target, samples, batch, lengths)
        return padded(arguments, roles, goal), padding

    def examples(self, arguments: Arguments) -> list[Arguments]:
        """Return the same call in each of the stated lengths, the longest first, without memory."""
        roles = roles_of(arguments, self.buckets)
        sizes = sizes_of(arguments, roles)
        lengths = reversed(self.buckets.multiples_of(self._unit))
        return [empty(arguments, roles, replace(sizes, length=length)) for length in lengths]


def _first_of_each_part(mesh: Mesh, parts: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks, by their number in the mesh, one for each part of the batch, in the order of the parts."""
    found = [0]
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        found = [number * size + place for number in found for place in range(size if name in parts else 1)]
    return tuple(found)
