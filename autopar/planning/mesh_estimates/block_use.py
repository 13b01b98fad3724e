"""Seconds and bytes of every block of a model by one plan of a shorter one: bytes add up to those of a stage.

seconds   a block begins where the one before it ends, in the simulated micro-batch and in the simulated step; streams
          that are busier with the weights of a block than computing is set the pace: what they are late by grows from
          layer to layer, which a few layers do not show
host      launches the blocks of a stage one after another and waits for none: its lead from one block is spent in
          another, so that a stage takes what its devices or its host take for all of its blocks, whichever is more
ends      the first block of a stage waits for its weights, which no block before it lets be on their way, and its
          backward for the last gradients; so does the backward of the last block for weights that are gathered again.
          What a block takes more where it is simulated alone is added to stages that begin or end with it
bytes     of one device, by block (`block_bytes`)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costs.memory.model import MemoryModel
from autopar.costs.steps.sends import Send, reduced_overlapped
from autopar.costs.steps.step import last_microbatch_tasks, microbatch_tasks, step_tasks
from autopar.costs.timeline.simulation import behind_another, simulate
from autopar.costs.timeline.values import COMPUTE, Task, Timeline
from autopar.planning.mesh_estimates.block_bytes import StageBytes, bytes_of_blocks
from autopar.planning.mesh_estimates.shortened import Shortened
from autopar.planning.pipeline.block_costs import (
    FORWARD,
    OPTIMIZER,
    PlannedWhole,
    block_of_decisions,
    boundary_bytes,
    crossings,
    ends_block,
    launching_of_blocks,
    paced,
    spans_of_blocks,
)
from autopar.planning.pipeline.stage_seconds import weight_seconds_by_decision
from autopar.planning.pipeline.stages.blocks import Block
from autopar.planning.step_seconds import parts_by_decision, reductions_by_decision

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockUse:
    """Seconds and bytes of every block of a model, arrays of one entry for each; and what no block has."""

    forward: Floats
    """Seconds of each block's forward for one micro-batch."""
    backward: Floats
    launching: Floats
    """Seconds in which a host launches each block's forward, and its backward: [2, block]."""
    weights: Floats
    """Seconds of a backward in which calls compute gradients of weights."""
    entering: Floats
    """Seconds beyond `forward` of a stage's first block."""
    turning: Floats
    """More than `backward`, of a stage's last block."""
    leaving: Floats
    """More than `backward`, of a stage's first block."""
    once: Floats
    """Seconds of each block's work once a step, as a sum of costs.

    Pipeline stages do this work after their last micro-batch.
    """
    reductions: Floats
    """Seconds of each block's gradient reductions, done once a step and overlapped with the last backward."""
    slowing: Floats
    """Seconds by which its reductions lengthen the last backward of a block that is alone on its stage.

    A reduction in two steps is waited for between them, and exchanges of tokens wait on the same communicator.
    """
    slowing_weights: Floats
    """The same if a schedule makes the gradients of weights apart."""
    step: Floats
    """Simulated seconds of each block in a step of one micro-batch, including all work done once a step."""
    rest: float
    """Seconds of that step outside its blocks: what it waits for behind the last."""
    rest_of_each: float
    """Seconds of a micro-batch outside its blocks."""
    stored: Floats
    gradients: Floats
    reduced: Floats
    saved: Floats
    arriving: Floats
    transient: Floats
    sent: Floats
    """Bytes that cross the beginning of each block."""
    accumulates: bool
    """True if gradients of several micro-batches are added up."""
    short: Shortened
    strategies: Mapping[str, str]
    """Decision of the shorter program → its strategy in this plan, by name."""
    mode: str
    """Recomputation of all blocks."""
    waited: Mapping[str, float]
    """Shares of weights' collectives that the plan's costs wait for (`OverlappedWork.waited`)."""
    zigzag_axes: frozenset[str]
    """Axes over which the plan zigzag-shards positions."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of one micro-batch if all blocks run on the same devices."""
        return float(self.step.sum()) + self.rest

    @property
    def busy(self) -> Floats:
        """Seconds for which a micro-batch keeps devices and hosts busy: [2, block]."""
        return np.array([self.forward + self.backward, self.launching.sum(axis=0)])

    @property
    def microbatch_seconds(self) -> float:
        devices, hosts = map(float, self.busy.sum(axis=1))
        return max(devices + self.rest_of_each, hosts)

    def stages(self, starts: Sequence[int] | NDArray[np.intp]) -> StageBytes:
        """Return the bytes of stages that begin with these blocks."""

        def total(array: Floats) -> Floats:
            return np.add.reduceat(array, starts)

        first, last = np.asarray(starts), np.append(starts, len(self.forward))[1:] - 1
        ahead, made = np.cumsum(self.saved) - self.saved, np.cumsum(self.gradients)
        fullest = ahead + self.transient
        if self.accumulates:
            running = np.maximum.reduceat(fullest, starts) - ahead[first]
        else:  # gradients of the blocks behind are there
            running = np.maximum.reduceat(fullest - made, starts) - ahead[first] + made[last]
        gradients, received = total(self.gradients), self.arriving[first]
        return StageBytes(
            stored=total(self.stored),
            gradients=gradients,
            ending=gradients + total(self.reduced),
            saved=total(self.saved) - received,
            running=running - received,
            accumulates=self.accumulates,
        )


def block_use(
    short: Shortened, memory: MemoryModel, choices: Sequence[int], mode: str, is_whole: bool = True
) -> BlockUse:
    """Return what every block of the whole model takes by a choice per decision of the shorter one, in one mode.

    The seconds of a step are simulated if all blocks stand on the same devices (`is_whole`).
    """
    space, blocks, count = memory.space, short.blocks, len(short.blocks)
    modes = dict.fromkeys(memory.lifetimes.segments, mode)
    homes = block_of_decisions(space, blocks)
    once, weights, reduced_alone = np.zeros(count), np.zeros(count), np.zeros(count)
    parts, reduced = parts_by_decision(memory, choices, modes), reductions_by_decision(memory, choices)
    for home, own, reducing, computing in zip(
        homes, parts, reduced, weight_seconds_by_decision(memory, choices), strict=True
    ):
        if home is not None:
            once[home] += max(own.once - reducing, 0.0)
            reduced_alone[home] += reducing
            weights[home] += computing
    seconds = _Seconds(memory, choices, homes, short)
    launched = microbatch_tasks(memory, choices, modes)
    tasks = [replace(task, launch=0.0) for task in launched]
    each = seconds.of(tasks)
    entering, turning, leaving = seconds.at_ends(tasks, each)
    last = last_microbatch_tasks(memory, choices, modes)
    reductions, slowing, slowing_weights = seconds.of_sums(last, reduced_alone), np.zeros(count), np.zeros(count)
    if not is_whole:
        shares = np.divide(weights, each.backward, out=np.zeros(count), where=each.backward > 0)
        slowing = seconds.slowed(last, reduced_alone)
        slowing_weights = seconds.slowed(last, reduced_alone, np.minimum(shares, 1.0))
    step = seconds.of(step_tasks(memory, choices, modes)) if is_whole else each
    num_bytes = bytes_of_blocks(memory, choices, modes, homes, count)
    whole = PlannedWhole(memory, tuple(choices), modes)
    sent = np.zeros(count)
    for node, (made, last) in crossings(space, blocks).items():
        sent[made + 1 : last + 1] += boundary_bytes(whole, node)
    at = np.array(short.origin, dtype=np.intp)
    return BlockUse(
        forward=each.forward[at],
        backward=each.backward[at],
        launching=seconds.launching(launched)[:, at],
        weights=np.minimum(weights, each.backward)[at],
        entering=entering[at],
        turning=turning[at],
        leaving=leaving[at],
        once=once[at],
        reductions=reductions[at],
        slowing=slowing[at],
        slowing_weights=slowing_weights[at],
        step=(step.forward + step.backward + step.optimizer)[at],
        rest=step.rest,
        rest_of_each=each.rest,
        **{name: array[at] for name, array in num_bytes.items()},
        sent=sent[at],
        accumulates=memory.microbatches.several,
        short=short,
        strategies={
            each.name: str(each.candidates.strategies[choice])
            for each, choice in zip(space.decisions, choices, strict=True)
        },
        mode=mode,
        waited=dict(space.overlapped.waited),
        zigzag_axes=frozenset(space.zigzag_axes),
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    """Seconds of blocks in a simulated step."""

    forward: Floats
    backward: Floats
    optimizer: Floats
    rest: float


class _Seconds:
    """Blocks of the tasks of a step."""

    def __init__(
        self, memory: MemoryModel, choices: Sequence[int], homes: Sequence[int | None], short: Shortened
    ) -> None:
        space, self.count = memory.space, len(short.blocks)
        self.share = space.hardware.communication_share
        self.home = {d.name: home for d, home in zip(space.decisions, homes, strict=True) if home is not None}
        for number, home in enumerate(homes):
            if home is not None:
                self.home.setdefault(memory.lifetimes.layer[number], home)
        self.repeated = np.bincount(np.array(short.origin), minlength=self.count) > 1

    def of(self, tasks: Sequence[Task]) -> _Spans:
        """Simulate the tasks, and return what each block takes."""
        found = simulate(tasks, self.share)
        forward, backward = spans_of_blocks(found.events, self.home, self.count)
        optimizer = np.zeros(self.count)
        for event in found.events:
            home = self.home.get(event.task.row)
            if home is not None and event.task.phase == OPTIMIZER and not event.task.weights:
                optimizer[home] += event.end - event.start
        rest = max(found.seconds - forward.sum() - backward.sum() - optimizer.sum(), 0.0)
        return _Spans(*self._paced(found, forward, backward), optimizer, rest)

    def at_ends(self, tasks: Sequence[Task], each: _Spans) -> tuple[Floats, Floats, Floats]:
        """Return what each block takes more at the ends of a stage: of its forward, its backward, and behind that."""
        found = np.zeros((3, self.count))
        for home in range(self.count):
            own = behind_another(_tasks_of(tasks, [self.home.get(each.row) == home for each in tasks]), self.share)
            waited_for = [event for event in own if ends_block(event.task)]
            turn = max((event.end for event in waited_for if event.task.phase == FORWARD), default=0.0)
            end, last = (max((event.end for event in events), default=0.0) for events in (waited_for, own))
            found[:, home] = turn - each.forward[home], end - turn - each.backward[home], last - end
        return tuple(np.maximum(found, 0.0))

    def of_sums(self, tasks: Sequence[Task], alone: Floats) -> Floats:
        """Return the seconds of each block's reductions of sums, on the stream that has the most of them.

        A message of several layers counts in each by its share of the reductions that weights take `alone`.
        """
        found: dict[str, Floats] = defaultdict(lambda: np.zeros(self.count))
        shares = _shares(alone)
        for task in tasks:
            if not task.of_sums:
                continue
            if (home := self.home.get(task.row)) is not None:
                found[task.stream][home] += task.seconds
            else:
                found[task.stream] += task.seconds * shares
        return max(found.values(), key=np.sum, default=np.zeros(self.count))

    def slowed(self, tasks: Sequence[Task], alone: Floats, of_weights: Floats | None = None) -> Floats:
        """Return the seconds by which reductions of sums lengthen the backward of each block, if it is alone.

        Args:
            tasks: The tasks of the last micro-batch.
            alone: Seconds of the reductions of each block's weights, by which blocks share messages of several.
            of_weights: The share of each backward that makes gradients of weights, if a schedule makes them apart.
        """
        found = np.zeros(self.count)
        if not any(task.of_sums for task in tasks):
            return found
        homes, listed = self._with_messages_of_several(tasks, _shares(alone))
        for home in range(self.count):
            own = _tasks_of(listed, [each == home for each in homes])
            apart = None if of_weights is None else float(of_weights[home])
            found[home] = reduced_overlapped(own, self.share, Send(), Send(), apart).slowing
        return found

    def _with_messages_of_several(self, tasks: Sequence[Task], shares: Floats) -> tuple[list[int | None], list[Task]]:
        """Return the block of each task, and the tasks: a message of several layers is in the block that completes it.

        Messages of a block last as long as its share of all of them.
        """
        homes, last = list[int | None](), None
        seconds = np.zeros(self.count)
        for task in tasks:
            home = self.home.get(task.row)
            if home is None and task.of_sums and last is not None:
                home = last
                seconds[home] += task.seconds
            last = last if home is None else home
            homes.append(home)
        scales = np.divide(seconds.sum() * shares, seconds, out=np.ones(self.count), where=seconds > 0)
        listed = [
            replace(task, seconds=task.seconds * float(scales[home]))
            if home is not None and self.home.get(task.row) is None
            else task
            for task, home in zip(tasks, homes, strict=True)
        ]
        return homes, listed

    def _paced(self, found: Timeline, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
        """Return the seconds of blocks, of repeated ones at least those of their busiest stream of weights.

        Nor are they below those of the host, whose lead from the forward is left in the backward.
        """
        busy: dict[tuple[bool, str], Floats] = defaultdict(lambda: np.zeros(self.count))
        for event in found.events:
            home, task = self.home.get(event.task.row), event.task
            if home is not None and task.weights and task.phase != OPTIMIZER:
                busy[task.phase == FORWARD, task.stream][home] += task.seconds
        for (is_forward, stream), each in busy.items():
            assert stream != COMPUTE, "weights move on streams of their own"
            spans = forward if is_forward else backward
            np.copyto(spans, np.maximum(spans, each), where=self.repeated)
        return paced(forward, backward, self.launching([each.task for each in found.events]) * self.repeated)

    def launching(self, tasks: Sequence[Task]) -> Floats:
        """Return the seconds in which a host launches each block's forward, and its backward: [2, block]."""
        return launching_of_blocks(tasks, self.home, self.count)


def _shares(seconds: Floats) -> Floats:
    return seconds / total if (total := float(seconds.sum())) else seconds


def _tasks_of(tasks: Sequence[Task], is_own: Sequence[bool]) -> list[Task]:
    """Return some tasks, which wait for one another alone; those of the backward for the end of forward."""
    place: dict[int, int] = {}
    found: list[Task] = []
    turn: tuple[int, ...] = ()
    for number, task in enumerate(tasks):
        if not is_own[number]:
            continue
        if task.phase == FORWARD:
            turn = (len(found),) if task.stream == COMPUTE else turn
        place[number] = len(found)
        own = tuple(place[each] for each in task.after if each in place)
        found.append(replace(task, after=own or (() if task.phase == FORWARD else turn)))
    return found


def strategies_of(uses: Sequence[BlockUse], whole: Sequence[Block]) -> dict[str, frozenset[str]]:
    """Return the strategies that decisions of the whole program have in any of some plans of the same shorter one.

    `whole` are the blocks of the whole program. Decisions are by name; those of shared reshards are called by the node
    that makes their tensor.
    """
    names = uses[0].short.names(whole)
    by_node: dict[str, list[tuple[str, frozenset[str]]]] = defaultdict(list)
    for decision in uses[0].strategies:
        node, slash, rest = decision.partition("/")
        node, colon, output = node.partition(":")
        behind = f"{colon}{output}{slash}{rest}"
        by_node[node].append((behind, frozenset(each.strategies[decision] for each in uses)))
    nodes = dict.fromkeys((*names, *by_node))
    return {f"{node}{behind}": found for node in nodes for behind, found in by_node.get(names.get(node, node), ())}
