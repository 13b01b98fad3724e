"""A micro-batch of a pipeline's stage beside what the stage sends to others.

While a stage runs forward, the gradient that it made last is on its way to the stage before it; while it runs backward,
the output that it made last is on its way to the stage after it, as in the steady state of 1F1B. Both share the ports
of the links that they cross with the stage's collectives: they slow these, and are slowed by them. So do the reductions
of gradients that run beside the stage's last backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autopar.steps.step import LastMicrobatch
from autopar.timeline.simulation import simulate
from autopar.timeline.values import COMPUTE, Task

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
    """Seconds of a stage's forward and backward, and of what it sends beside them."""

    forward: float
    backward: float
    send_forward: float
    send_backward: float


@dataclass(frozen=True, slots=True)
class ReductionSeconds:
    """Seconds of the reductions of summed gradients, beside a stage's last backward and behind it."""

    slowing: float = 0.0
    """By which the last backward is longer for them."""
    slowing_send: float = 0.0
    """By which the transfer of the last gradient is longer for them."""
    behind: float = 0.0
    """For which they run on when the last backward has ended."""
    alone: float = 0.0
    """Of those on one communicator, one after the other, on the one that has the most."""


def beside_sends(tasks: Sequence[Task], share: float, forward: Send, backward: Send) -> MicrobatchSeconds:
    """Return the seconds of a micro-batch's tasks beside what its stage sends.

    Args:
        tasks: The tasks of the micro-batch, those of the forward first.
        share: The share of the device that a running collective takes.
        forward: What the stage sends to the stage after it.
        backward: What it sends to the stage before it.
    """
    found = simulate(_with_sends(tasks, forward, backward), share)
    own = [each for each in found.events if each.task.stream != STREAM]
    first = _begin_of_backward(tasks)
    ends = [max((each.end for each in part), default=0.0) for part in (own[:first], own)]
    of_gradient, of_output = (each.end - each.start for each in found.events if each.task.stream == STREAM)
    return MicrobatchSeconds(ends[0], ends[1] - ends[0], of_output, of_gradient)


def reduced_beside(
    last: LastMicrobatch, share: float, forward: Send, backward: Send, of_weights: float | None = None
) -> ReductionSeconds:
    """Return the seconds of a stage's last reductions, beside its backward and what it sends.

    The gradient of the last micro-batch travels behind its backward, beside what is left of the reductions.

    Args:
        last: The last micro-batch of the step.
        share: The share of the device that a running collective takes.
        forward: What the stage sends to the stage after it.
        backward: What it sends to the stage before it.
        of_weights: The share of the backward's computing that makes gradients of weights, if a schedule makes them
            apart: then reductions run beside that alone, and the gradient travels beside it.
    """
    if not last.reductions:
        return ReductionSeconds()
    alone: dict[str, float] = defaultdict(float)
    for number in last.reductions:
        alone[last.tasks[number].stream] += last.tasks[number].seconds
    tasks = last.tasks if of_weights is None else [_of_weights(each, of_weights) for each in last.tasks]
    tasks = [last.tasks[n] if n in last.reductions else each for n, each in enumerate(tasks)]
    without = [replace(each, seconds=0.0) if n in last.reductions else each for n, each in enumerate(tasks)]
    sends = (forward, backward) if of_weights is None else (Send(), backward)
    end, reduced, sent = _ends(tasks, last.reductions, share, *sends, sends_at_end=of_weights is None)
    usual, _, usually_sent = _ends(without, last.reductions, share, *sends, sends_at_end=of_weights is None)
    return ReductionSeconds(
        max(0.0, end - usual), max(0.0, sent - usually_sent), max(0.0, reduced - end), max(alone.values())
    )


def _ends(
    tasks: Sequence[Task],
    reductions: Collection[int],
    share: float,
    forward: Send,
    backward: Send,
    sends_at_end: bool,
) -> tuple[float, float, float]:
    """Return when the backward ends, when its reductions do, and how long the last gradient travels."""
    first, listed = _begin_of_backward(tasks), _with_sends(tasks, forward, backward)
    places = [number + 1 + (number >= first) for number in range(len(tasks))]
    own = [place for number, place in enumerate(places) if number not in reductions]
    if sends_at_end:
        listed.append(_task(backward, "backward", tuple(own)))
    events = simulate(listed, share).events
    sent = events[-1 if sends_at_end else 0]
    end = max((events[place].end for place in own), default=0.0)
    return end, max(events[places[number]].end for number in reductions), sent.end - sent.start


def _of_weights(task: Task, share: float) -> Task:
    """The part of a task of a micro-batch in which the gradients of weights are made."""
    computes = task.stream == COMPUTE and task.phase != "forward"
    return replace(task, seconds=share * task.seconds if computes else 0.0)


def _begin_of_backward(tasks: Sequence[Task]) -> int:
    return next((number for number, each in enumerate(tasks) if each.phase != "forward"), len(tasks))


def _with_sends(tasks: Sequence[Task], forward: Send, backward: Send) -> list[Task]:
    """The tasks of a micro-batch, a send before them, and one before those of the backward."""
    first = _begin_of_backward(tasks)
    computed = [number for number, each in enumerate(tasks[:first]) if each.stream == COMPUTE]
    behind = (computed[-1] + 1,) if computed else ()
    moved = [replace(each, after=tuple(number + 1 + (number >= first) for number in each.after)) for each in tasks]
    return [_task(backward, "forward", ()), *moved[:first], _task(forward, "backward", behind), *moved[first:]]


def _task(send: Send, phase: str, after: tuple[int, ...]) -> Task:
    return Task("send", STREAM, send.seconds, phase, after=after, links=send.links, beside=True)
