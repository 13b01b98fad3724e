"""The messages of weights: gathered for use, gathered again for the backward, their gradients reduced.

What is issued ahead, and what is left running, is as `runtime.rewrite.prefetch`, `runtime.collectives.regather` and
`runtime.collectives.buckets` have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.moves import transfers
from autopar.hardware.collectives import Transfer
from autopar.program.program import info_of
from autopar.space.buckets import Bucket
from autopar.space.space import Space
from autopar.steps.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of a bucket's weights, or of their gradients."""

    transfer: Transfer
    waited_for: bool
    """Whether it is waited for at once; else at the end of the backward."""


class Messages:
    """What a bucket sends of its weights at some positions."""

    def __init__(self, space: Space, bucket: Bucket, positions: Sequence[int], casts_late: bool) -> None:
        self.space, self.bucket, self.positions = space, bucket, positions
        self.wires = [space.inbound[end] for end in bucket.ends]
        self.casts_late = casts_late

    def gathers(self, positions: Sequence[int] | None = None) -> list[Transfer]:
        """What gathers its weights, or those at other positions, one step after the other."""
        chosen = self.positions if positions is None else positions
        sums = [self._step(number, False, chosen) for number in range(len(self.bucket.steps))]
        return [each for each in sums if each is not None and each.num_bytes]

    @cached_property
    def reductions(self) -> tuple[Message, ...]:
        """What reduces their gradients, in the order of the backward."""
        found = []
        for number in reversed(range(len(self.bucket.steps))):
            total = self._step(number, True, self.positions)
            if total is not None:
                found.append(Message(total, not (number == 0 and self._is_left_running(number))))
        return tuple(found)

    def _step(self, number: int, backward: bool, positions: Sequence[int]) -> Transfer | None:
        """The collective of a step for weights at some positions; None where it has none."""
        step = self.bucket.steps[number]
        moved = [
            each
            for position in positions
            for each in transfers(
                self.bucket.paths[position].moves[step.number], self.wires[position].tensor, self.space.mesh, False
            )
            if each.backward == backward
        ]
        if not moved:
            return None
        return Transfer(moved[0].collective, step.axis, sum(each.num_bytes for each in moved), backward)

    def _is_left_running(self, number: int) -> bool:
        """Whether gradients go from here to where they are kept without a cast or another move."""
        tensor = self.wires[0].tensor
        stored = {info_of(self.space.decisions[source].node).dtype for source in self.bucket.sources}
        if self.casts_late:
            names = [self.space.weight_casts[self.space.decisions[source].name] for source in self.bucket.sources]
            stored = {info_of(self.space.decisions[self.space.index[name]].node).dtype for name in names}
        elif any(self.space.decisions[source].name in self.space.weight_casts for source in self.bucket.sources):
            return self.space.program.reduced is None
        summed = self.bucket.reduced or tensor.dtype
        return stored == {summed} if self.bucket.steps[number].gathers else summed == tensor.dtype


@dataclass(slots=True, eq=False)
class Regathered:
    """The weights of a bucket that the backward gathers again."""

    gathers: Sequence[Transfer]
    layer: int
    row: str
    last: int
    """The place in the order of the last call that has kept one of them: the backward begins there."""
    issued: int | None = None
    there: bool = False


class Backward:
    """How a backward has its weights: those that are used, and those that come next on their way."""

    def __init__(self, tasks: Tasks, buckets: Iterable[Regathered], depth: int, streams: dict[str, str]) -> None:
        self.tasks, self.depth, self.streams = tasks, depth, streams
        self.order = sorted(buckets, key=lambda each: -each.last)

    def use(self, bucket: Regathered) -> None:
        """Have the weights for a call, with those of its layer, and let those of the next layers be on their way."""
        if bucket.there:
            return
        self._fetch(bucket)
        if not self.depth:
            return
        next_ones = self.order[self.order.index(bucket) + 1 :]
        ahead = list(itertools.takewhile(lambda each: 0 <= bucket.layer - each.layer <= self.depth, next_ones))
        own, later = ([each for each in ahead if (each.layer == bucket.layer) == now] for now in (True, False))
        self._begin(own)
        for each in own:
            if not each.there:
                self._fetch(each)
        self._begin(later)

    def _begin(self, buckets: Iterable[Regathered]) -> None:
        """Let weights be on their way."""
        for each in buckets:
            if each.issued is None and not each.there:
                each.issued = self._issue(each, 0)

    def _issue(self, bucket: Regathered, step: int) -> int:
        transfer = bucket.gathers[step]
        return self.tasks.issue(transfer, bucket.row, self.streams.get(transfer.axis, ""), weights=True)

    def _fetch(self, bucket: Regathered) -> None:
        for step in range(len(bucket.gathers)):
            ahead = step == 0 and bucket.issued is not None
            self.tasks.wait([bucket.issued if ahead and bucket.issued is not None else self._issue(bucket, step)])
        bucket.there = True
