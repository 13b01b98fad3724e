"""The messages of weights: gathered for use, gathered again for the backward, their gradients reduced.

Collectives are issued ahead, and left running, as in `runtime.rewrite.prefetch`, `runtime.collectives.regather` and
`runtime.collectives.gradient_buckets`.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.pricing.moves import transfers
from autopar.costs.space.parameter_buckets import MOST_RUNNING, Bucket
from autopar.costs.space.space import Space
from autopar.costs.steps.tasks import Tasks
from autopar.ir.program.program import info_of


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of a bucket's weights, or of their gradients."""

    transfer: Transfer
    waited_for: bool
    """True if the collective is waited for at once; False if only at the end of the backward."""
    of_sum: bool
    """True if it reduces gradients that several micro-batches have added up."""


class BucketMessages:
    """Messages that a bucket sends for its weights at some positions."""

    def __init__(
        self,
        space: Space,
        bucket: Bucket,
        positions: Sequence[int],
        casts: Container[int] = (),
        before: Sequence[int] | None = None,
        sums: tuple[bool, bool] = (False, False),
    ) -> None:
        """Describe the messages of a bucket.

        Args:
            space: The space of plans.
            bucket: The bucket.
            positions: Those of weights that are gathered, and whose gradients are reduced on the way back.
            casts: Sources whose casts wait for the first gather.
            before: Those of weights whose gradients are reduced by the steps before the first gather; None: the same.
            sums: Whether micro-batches have added up what the steps before the first gather reduce, and the others.
        """
        self.space, self.bucket, self.positions = space, bucket, positions
        self.before, self.sums = positions if before is None else before, sums
        self.edges = [space.inbound[end] for end in bucket.ends]
        self.casts_late = any(source in casts for source in bucket.sources)

    def gathers(self, positions: Sequence[int] | None = None) -> list[Transfer]:
        """Return the collectives that gather its weights, or those at other positions, one step after the other."""
        chosen = self.positions if positions is None else positions
        sums = [self._step(number, False, chosen) for number in range(len(self.bucket.steps))]
        return [each for each in sums if each is not None and each.num_bytes]

    @cached_property
    def reductions(self) -> tuple[Message, ...]:
        """Messages that reduce the gradients, in the order of the backward."""
        found, first = [], first_gather(self.bucket)
        end = 0 if self.before else first
        for number in reversed(range(len(self.bucket.steps))):
            total = self._step(number, True, self.positions if number >= first else self.before)
            if total is not None:
                left_running = number == end and self._is_left_running(number)
                found.append(Message(total, not left_running, self.sums[number >= first]))
        return tuple(found)

    def _step(self, number: int, backward: bool, positions: Sequence[int]) -> Transfer | None:
        """Return the collective of a step for weights at some positions; None where it has none."""
        step = self.bucket.steps[number]
        moved = [
            each
            for position in positions
            for each in transfers(
                self.bucket.paths[position].moves[step.number], self.edges[position].tensor, self.space.mesh, False
            )
            if each.backward == backward
        ]
        if not moved:
            return None
        return Transfer(moved[0].collective, step.axis, sum(each.num_bytes for each in moved), backward)

    def _is_left_running(self, number: int) -> bool:
        """Return whether gradients go from this step to their storage without a cast or another move."""
        tensor = self.edges[0].tensor
        stored = {info_of(self.space.decisions[source].node).dtype for source in self.bucket.sources}
        if self.casts_late:
            names = [self.space.weight_casts[self.space.decisions[source].name] for source in self.bucket.sources]
            stored = {info_of(self.space.decisions[self.space.index[name]].node).dtype for name in names}
        elif any(self.space.decisions[source].name in self.space.weight_casts for source in self.bucket.sources):
            return self.space.program.reduced is None
        summed = self.bucket.reduced or tensor.dtype
        return stored == {summed} if self.bucket.steps[number].gathers else summed == tensor.dtype


def first_gather(bucket: Bucket) -> int:
    """Return the number of the first step that gathers; that of all steps if none does."""
    return next((number for number, step in enumerate(bucket.steps) if step.gathers), len(bucket.steps))


def of_sums(
    space: Space, bucket: Bucket, casts: Container[int], reduce_each: bool
) -> Iterator[tuple[BucketMessages, bool]]:
    """Yield the messages of a bucket that gathers some weights, or sums gradients, once per step of several
    micro-batches.

    True if they are issued when the last backward is over: they are those of gradients that each backward reduces
    before. With `reduce_each` that are all that one message gathers.
    """
    every, first = range(len(bucket.ends)), first_gather(bucket)
    held = [position for position in every if position not in bucket.regathered]
    each = reduce_each and sum(step.gathers for step in bucket.steps) == 1
    if first and each and held:
        yield BucketMessages(space, bucket, held, casts, before=()), False
    if first and (each or bucket.regathered):
        yield BucketMessages(space, bucket, () if each else held, casts, every, (True, True)), True
    elif held:
        yield BucketMessages(space, bucket, held, casts, every, (True, not each)), False


class Reductions:
    """Reductions of gradients that a backward issues, and what it waits for of them."""

    def __init__(self, tasks: Tasks, frees: bool, with_sums: bool) -> None:
        """Start without reductions; with `frees`, all are waited for at once.

        Reductions of sums are issued only `with_sums`, and left to the step.
        """
        self.tasks, self.frees, self.with_sums = tasks, frees, with_sums
        self.left_running: list[int] = []
        """Tasks that the backward waits for at its end."""
        self._scattered: list[int] = []
        """Reduce-scatters that may be running: each holds what it sends."""

    def issue(self, messages: BucketMessages) -> None:
        """Reduce the gradients of a bucket."""
        for message in messages.reductions:
            if message.of_sum and not self.with_sums:
                continue
            row = messages.bucket.layer or "gradients"
            issued = self.tasks.issue(message.transfer, row, weights=True, of_sums=message.of_sum)
            if message.transfer.collective == "reduce_scatter":
                self._scattered.append(issued)
                self.tasks.wait(self._scattered[:-MOST_RUNNING])
                del self._scattered[:-MOST_RUNNING]
            if message.waited_for or self.frees:
                self.tasks.wait([issued])
                self._scattered = [each for each in self._scattered if each != issued]
            elif not message.of_sum:
                self.left_running.append(issued)


@dataclass(slots=True, eq=False)
class Regathered:
    """The weights of a bucket that the backward gathers again."""

    gathers: Sequence[Transfer]
    layer: int
    row: str
    last: int
    """Position of the last call that saved one of them: the backward begins there."""
    issued: int | None = None
    there: bool = False


class Backward:
    """Regathering of weights in a backward: those that are used now, and those of the next layers, fetched ahead."""

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
