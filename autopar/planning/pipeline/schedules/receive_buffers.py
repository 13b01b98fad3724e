"""Number of receive buffers that a stage holds at once, in the order in which its rank receives and computes.

A buffer is allocated when its receive is posted. It is freed after the backward of its micro-batch, weights included: a
forward input is saved for that backward, and a gradient is what the backward starts from.

Between two stages of one rank nothing is received. The tensor that the earlier stage hands over counts as a received
one, and so does the gradient that the later stage hands back.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planning.pipeline.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ReceiveBuffers:
    """The most buffers of a stage at once, in micro-batches."""

    inputs: int
    """Buffers of forward inputs."""
    gradients: int
    """Buffers of gradients of the tensors that the stage sends."""


def receive_buffers(schedule: Schedule, stage: int) -> ReceiveBuffers:
    """Return the most buffers that `stage` holds at once."""
    rank, last = schedule.rank_of(stage), schedule.num_stages - 1
    before = stage - 1 if stage and schedule.rank_of(stage - 1) == rank else None
    after = stage + 1 if stage < last and schedule.rank_of(stage + 1) == rank else None
    inputs, gradients = set[int](), set[int]()
    most_inputs = most_gradients = 0
    for step in schedule.orders_with_receives[rank]:
        number = step.microbatch
        if (step.stage == stage and step.kind == "RECV_F") or (step.stage == before and step.kind == "F"):
            inputs.add(number)
        if (step.stage == stage and step.kind == "RECV_B") or (step.stage == after and step.kind in ("B", "I")):
            gradients.add(number)
        most_inputs, most_gradients = max(most_inputs, len(inputs)), max(most_gradients, len(gradients))
        if step.stage == stage and step.kind in ("B", "W"):
            inputs.discard(number)
            gradients.discard(number)
    return ReceiveBuffers(most_inputs, most_gradients)
