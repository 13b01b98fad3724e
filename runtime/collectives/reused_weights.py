"""Gathered weights whose tensors outlive a step: their storages are filled by a gather, and empty between two.

An allocation and a view for each weight of each gather would take more operations than the gather itself. So weights
that are gathered again for the backward are made once, as in FSDP2, and their storages are resized. A bucket serves one
gather at a time; a second one that runs meanwhile takes another bucket.

Whoever holds the storage of a weight that is to be emptied keeps it as it is, and the next gather makes a new one.
Copies into a storage do not count as changes of the weight: it is the same each time.

Legend: n ranks, m elements of a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

_holders = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(slots=True, eq=False)
class ReusedWeight:
    """A weight that is made once."""

    weight: Tensor
    """The weight as a forward takes it."""
    rows: Tensor
    """A view [n, m] of its storage, to which messages are copied; it has a version counter of its own."""
    storage: torch.UntypedStorage
    address: int
    num_bytes: int
    holders: int
    """Number of holders of the storage when nobody uses the weight."""
    _views: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, weight: Tensor, num_ranks: int, num_elements: int) -> ReusedWeight:
        """Take over a weight that has just been gathered."""
        weight = weight.data  # no view of another tensor
        rows = weight.data.as_strided((num_ranks, num_elements), (num_elements, 1), 0)
        storage = weight.untyped_storage()
        return cls(weight, rows, storage, storage._cdata, storage.nbytes(), 0)

    def view(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
        """Return a view that all uses of this shape share."""
        key = size, stride, offset
        found = self._views.get(key)
        if found is None:
            before = _holders(self.address)
            found = self._views[key] = self.rows.as_strided(size, stride, offset)
            self.holders += _holders(self.address) - before
        return found


class ReusedBucket:
    """Weights of a bucket, by their position in it; a gather makes the others anew."""

    left: ClassVar[list[ReusedBucket]] = []
    """Buckets that a backward needs no more, but for nodes of autograd that run now."""

    def __init__(self, pool: ReusedBuckets, key: Hashable, positions: Collection[int]) -> None:
        self.made: dict[int, ReusedWeight] = {}
        self._full: set[int] = set()
        self._pool, self._key, self._positions = pool, key, positions

    def filled(self, positions: Sequence[int]) -> list[ReusedWeight | None]:
        """Return weights whose storages have room for values now; None for those that are to be made anew."""
        found = []
        for position in positions:
            one = self.made.get(position)
            if one is not None:
                one.storage.resize_(one.num_bytes)
                self._full.add(position)
            found.append(one)
        return found

    def take_over(self, positions: Sequence[int], weights: list[Tensor], num_ranks: int, sizes: Sequence[int]) -> None:
        """Reuse weights that a gather has made, in their place in the list; `sizes` are the elements of a rank."""
        for i, (position, size) in enumerate(zip(positions, sizes, strict=True)):
            if position in self._positions and position not in self.made:
                self.made[position] = one = ReusedWeight.of(weights[i], num_ranks, size)
                weights[i] = one.weight
                one.holders = _holders(one.address)
                self._full.add(position)

    def empty(self, positions: Collection[int], last: bool = True) -> None:
        """Free weights that nobody uses any more; the `last` time, leave the others to those who hold them."""
        for position in positions:
            one = self.made[position]
            if _holders(one.address) <= one.holders:
                one.storage.resize_(0)
            elif last:
                del self.made[position]
            else:
                continue
            self._full.discard(position)
        self._give_back()

    def let_go(self, position: int) -> None:
        """Leave a weight to those who hold it, or its tensor; the next gather makes a new one."""
        del self.made[position]
        self._full.discard(position)
        self._give_back()

    def _give_back(self) -> None:
        if not self._full:
            self._pool.give_back(self._key, self)

    def leave(self) -> None:
        """Free the weights as soon as the nodes of autograd that have taken them are through."""
        self.left.append(self)

    @classmethod
    def empty_left(cls, last: bool = False) -> None:
        """Free what was left and nobody uses any more (`empty`)."""
        if not cls.left:
            return
        before = tuple(cls.left)
        cls.left.clear()
        for bucket in before:
            bucket.empty(tuple(bucket._full), last)
            if bucket._full:
                cls.left.append(bucket)


class ReusedBuckets:
    """The buckets of a graph that no gather uses now."""

    def __init__(self) -> None:
        self._unused: dict[Hashable, list[ReusedBucket]] = {}

    def taken(self, key: Hashable, positions: Collection[int]) -> ReusedBucket:
        """Return a bucket for one gather; buckets of one `key` have the same weights."""
        unused = self._unused.get(key)
        return unused.pop() if unused else ReusedBucket(self, key, positions)

    def give_back(self, key: Hashable, bucket: ReusedBucket) -> None:
        """Let another gather take a bucket."""
        self._unused.setdefault(key, []).append(bucket)
