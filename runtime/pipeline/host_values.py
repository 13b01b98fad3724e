"""Values that the ranks of a pipeline exchange from host to host, as each of them sees its own stages alone.

A stage's graph depends on the frozen parameters of the stages before it. So all ranks must make a new graph when one of
them has frozen or unfrozen a parameter. Every step asks, with a message of one number; only a change costs more.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from autopar.runtime.ranks.backends import HOST

T = TypeVar("T")


class HostValues(Generic[T]):
    """The values of all ranks of a group of hosts, in their order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._own: list[T] = []
        self.latest: tuple[T, ...] = ()
        """Values of all ranks when they were last exchanged."""

    def of_all_ranks(self, own: T) -> tuple[T, ...]:
        """Return the values of all ranks, of which this one has `own`; every rank of the group calls this."""
        changed = torch.tensor(int(self._own != [own]), device=HOST)
        dist.all_reduce(changed, dist.ReduceOp.MAX, self._group)
        if changed.item():
            gathered: list[T] = [own] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, own, group=self._group)
            self._own, self.latest = [own], tuple(gathered)
        return self.latest
