"""A micro-batch of a pipeline's stage, overlapped with the stage's sends.

While a stage runs forward, the gradient that it made last is on its way to the stage before it; while it runs backward,
the output that it made last is on its way to the stage after it, as in the steady state of 1F1B. Both share the ports
of the links that they cross with the stage's collectives: they slow these, and are slowed by them. So do the reductions
of gradients that overlap with the stage's last backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costs.timeline.simulation import behind_another, simulate
from autopar.costs.timeline.values import COMPUTE, Task

STREAM = "sends"


@dataclass(frozen=True, slots=True)
class Send:
    """Message of a stage to one other stage."""

    seconds: float = 0.0
    """Time alone on its links."""
    links: tuple[tuple[str, float], ...] = ()
    """The links that it loads, each with the share of a device's port that it takes alone."""


@dataclass(frozen=True, slots=True)
class MicrobatchSeconds:
    """Seconds of a stage's forward and backward, and of the sends that overlap with them."""

    forward: float
    backward: float
    send_forward: float
    send_backward: float


@dataclass(frozen=True, slots=True)
class ReductionSeconds:
    """Seconds of the reductions of summed gradients, during a stage's last backward and behind it."""

    slowing: float = 0.0
    """Seconds by which they lengthen the last backward."""
    slowing_send: float = 0.0
    """Seconds by which they lengthen the transfer of the last gradient."""
    behind: float = 0.0
    """Seconds for which they run on after the last backward has ended."""
    alone: float = 0.0
    """Seconds of the reductions on one communicator, one after the other, for the communicator that has the most."""


def overlapped_with_sends(tasks: Sequence[Task], share: float, forward: Send, backward: Send) -> MicrobatchSeconds:
    """Return the seconds of a micro-batch's tasks, overlapped with its stage's sends.

    Args:
        tasks: The tasks of the micro-batch, those of the forward first.
        share: The share of the device that a running collective takes.
        forward: What the stage sends to the stage after it.
        backward: What it sends to the stage before it.
    """
    found = behind_another(_with_sends(tasks, forward, backward), share)
    own = [each for each in found if each.task.stream != STREAM]
    first = _begin_of_backward(tasks)
    ends = [max((each.end for each in part), default=0.0) for part in (own[:first], own)]
    of_gradient, of_output = (each.end - each.start for each in found if each.task.stream == STREAM)
    return MicrobatchSeconds(ends[0], ends[1] - ends[0], of_output, of_gradient)


def reduced_overlapped(
    tasks: Sequence[Task], share: float, forward: Send, backward: Send, of_weights: float | None = None
) -> ReductionSeconds:
    """Return the seconds of a stage's last reductions, overlapped with its backward and its sends.

    The gradient of the last micro-batch is sent behind its backward, overlapped with the remaining reductions.

    Args:
        tasks: The tasks of the step's last micro-batch, with its reductions of sums.
        share: The share of the device that a running collective takes.
        forward: What the stage sends to the stage after it.
        backward: What it sends to the stage before it.
        of_weights: The share of the backward's computing that makes gradients of weights, if a schedule makes them
            apart: then reductions overlap with that alone, and so does the gradient's send.
    """
    alone: dict[str, float] = defaultdict(float)
    for each in tasks:
        alone[each.stream] += each.seconds if each.of_sums else 0.0
    if not any(alone.values()):
        return ReductionSeconds()
    if of_weights is not None:
        forward, tasks = Send(), [_of_weights(each, of_weights) for each in tasks]
    without = [replace(each, seconds=0.0) if each.of_sums else each for each in tasks]
    end, reduced, sent = _ends(tasks, share, forward, backward, sends_at_end=of_weights is None)
    usual, _, usually_sent = _ends(without, share, forward, backward, sends_at_end=of_weights is None)
    return ReductionSeconds(
        max(0.0, end - usual), max(0.0, sent - usually_sent), max(0.0, reduced - end), max(alone.values())
    )


def _ends(
    tasks: Sequence[Task], share: float, forward: Send, backward: Send, sends_at_end: bool
) -> tuple[float, float, float]:
    """Return when the backward ends, when its reductions do, and how long the last gradient travels."""
    listed = _with_sends(tasks, forward, backward)
    if sends_at_end:
        own = [n for n, each in enumerate(listed) if each.stream != STREAM and not each.of_sums]
        listed.append(_task(backward, "backward", tuple(own)))
    events = simulate(listed, share).events
    sent = events[-1 if sends_at_end else 0]
    own_events = [each for each in events if each.task.stream != STREAM]
    end = max((each.end for each in own_events if not each.task.of_sums), default=0.0)
    return end, max(each.end for each in own_events if each.task.of_sums), sent.end - sent.start


def _of_weights(task: Task, share: float) -> Task:
    """Return the part of a task of a micro-batch in which the gradients of weights are made.

    Collectives have run with the gradients of inputs: they are on streams of their own, so that none waits behind a
    reduction.
    """
    if task.of_sums:
        return task
    if task.stream == COMPUTE:
        return replace(task, seconds=share * task.seconds if task.phase != "forward" else 0.0)
    return replace(task, seconds=0.0, stream=f"{task.stream}, before")


def _begin_of_backward(tasks: Sequence[Task]) -> int:
    return next((number for number, each in enumerate(tasks) if each.phase != "forward"), len(tasks))


def _with_sends(tasks: Sequence[Task], forward: Send, backward: Send) -> list[Task]:
    """Return the tasks of a micro-batch, a send before them, and one before those of the backward."""
    first = _begin_of_backward(tasks)
    computed = [number for number, each in enumerate(tasks[:first]) if each.stream == COMPUTE]
    behind = (computed[-1] + 1,) if computed else ()
    moved = [replace(each, after=tuple(number + 1 + (number >= first) for number in each.after)) for each in tasks]
    return [_task(backward, "forward", ()), *moved[:first], _task(forward, "backward", behind), *moved[first:]]


def _task(send: Send, phase: str, after: tuple[int, ...]) -> Task:
    return Task("send", STREAM, send.seconds, phase, after=after, links=send.links, overlapped=True)
