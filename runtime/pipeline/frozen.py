"""Frozen parameters over all ranks of a pipeline; each rank sees those of its own stages.

A stage's graph depends on the frozen parameters of the stages before it. So all ranks must make a new graph when one of
them has frozen or unfrozen a parameter. Every step asks, with a message of one number from host to host; only a change
costs more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.ranks.backends import HOST


class FrozenNames:
    """The names of frozen parameters on all ranks of a group of hosts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._own: frozenset[str] | None = None
        self._all: frozenset[str] = frozenset()

    def of_all_ranks(self, own: frozenset[str]) -> frozenset[str]:
        """Return the names on all ranks, of which this one has `own`; every rank of the group calls this."""
        changed = torch.tensor(int(own != self._own), device=HOST)
        dist.all_reduce(changed, dist.ReduceOp.MAX, self._group)
        if changed.item():
            gathered: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, own, group=self._group)
            self._own, self._all = own, frozenset().union(*gathered)
        return self._all
