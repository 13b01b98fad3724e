"""A micro-batch of a pipeline's stage beside what the stage sends to others.

While a stage runs forward, the gradient that it made last is on its way to the stage before it; while it runs backward,
the output that it made last is on its way to the stage after it, as in the steady state of 1F1B. Both share the ports
of the links that they cross with the stage's collectives: they slow these, and are slowed by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def beside_sends(tasks: Sequence[Task], share: float, forward: Send, backward: Send) -> MicrobatchSeconds:
    """Return the seconds of a micro-batch's tasks beside what its stage sends.

    Args:
        tasks: The tasks of the micro-batch, those of the forward first.
        share: The share of the device that a running collective takes.
        forward: What the stage sends to the stage after it.
        backward: What it sends to the stage before it.
    """
    first = next((number for number, each in enumerate(tasks) if each.phase != "forward"), len(tasks))
    computed = [number for number, each in enumerate(tasks[:first]) if each.stream == COMPUTE]
    behind = (computed[-1] + 1,) if computed else ()
    moved = [replace(each, after=tuple(number + 1 + (number >= first) for number in each.after)) for each in tasks]
    found = simulate(
        [
            _task(backward, "forward", ()),
            *moved[:first],
            _task(forward, "backward", behind),
            *moved[first:],
        ],
        share,
    )
    own = [each for each in found.events if each.task.stream != STREAM]
    ends = [max((each.end for each in part), default=0.0) for part in (own[:first], own)]
    of_gradient, of_output = (each.end - each.start for each in found.events if each.task.stream == STREAM)
    return MicrobatchSeconds(ends[0], ends[1] - ends[0], of_output, of_gradient)


def _task(send: Send, phase: str, after: tuple[int, ...]) -> Task:
    return Task("send", STREAM, send.seconds, phase, after=after, links=send.links, beside=True)
