"""How many receive buffers a stage holds at once, counted along the order in which its rank receives and computes.

A buffer is allocated when its receive is posted, and freed when the backward of its micro-batch, weights included, has
run: a forward input is saved for that backward, a gradient is what it begins with.

Between two stages of one rank nothing is received. What the later one reads is what the earlier one sent, which that
stage holds as long as its own micro-batch is in flight; only what the later one keeps beyond that counts here. The
gradient that the later one hands back counts as one that is received.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.pipeline.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ReceiveBuffers:
    """The most buffers of a stage at once, in micro-batches."""

    inputs: int
    """For forward inputs."""
    gradients: int
    """For gradients of what the stage sends."""


def receive_buffers(schedule: Schedule, stage: int) -> ReceiveBuffers:
    """Return the most buffers that `stage` holds at once."""
    rank, last = schedule.rank_of(stage), schedule.num_stages - 1
    before = stage - 1 if stage and schedule.rank_of(stage - 1) == rank else None
    after = stage + 1 if stage < last and schedule.rank_of(stage + 1) == rank else None
    inputs, gradients, done = set[int](), set[int](), set[int]()
    most_inputs = most_gradients = 0
    for step in schedule.orders_with_receives[rank]:
        number, ends = step.microbatch, step.kind in ("B", "W")
        if (step.stage == stage and step.kind == "RECV_F") or (step.stage == before and ends and number not in done):
            inputs.add(number)
        if (step.stage == stage and step.kind == "RECV_B") or (step.stage == after and step.kind in ("B", "I")):
            gradients.add(number)
        most_inputs, most_gradients = max(most_inputs, len(inputs)), max(most_gradients, len(gradients))
        if step.stage == stage and ends:
            inputs.discard(number)
            gradients.discard(number)
            done.add(number)
    return ReceiveBuffers(most_inputs, most_gradients)
