"""Parts of a stage's predicted step: those done for each micro-batch, and those done once.

forward     calls, the collectives and moves of activations, weights that are gathered again for the backward
backward    calls, what runs again or is copied to the host and back, collectives of the backward
once        optimizer, casts of weights, moves of resident weights, and the reduction of their gradients
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.costs.hardware.collectives import Transfer, transfer_seconds
from autopar.costs.hardware.overlap import Message
from autopar.costs.memory.model import MemoryModel


class StepSeconds(NamedTuple):
    """Seconds of one micro-batch's forward and backward, and of what a step does once."""

    forward: float
    backward: float
    once: float

    @property
    def seconds(self) -> float:
        """Seconds of a step of one micro-batch."""
        return self.forward + self.backward + self.once

    def of(self, count: int) -> float:
        """Return the seconds of a step of `count` micro-batches, one after the other."""
        return count * (self.forward + self.backward) + self.once

    def per_microbatch(self, count: int) -> float:
        """Return the seconds of one of `count` micro-batches, with its share of what is done once: what the search
        makes least.
        """
        return self.forward + self.backward + self.once / count


def step_seconds_of(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], imbalance: float | None = None
) -> StepSeconds:
    """Return the parts of a choice per decision; `modes` says how segments are computed again.

    `imbalance` of the rows of experts is that of the space, unless it is given.
    """
    every = parts_by_decision(memory, choices, modes, imbalance)
    return StepSeconds(*(sum(each[part] for each in every) for part in range(3)))


def parts_by_decision(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], imbalance: float | None = None
) -> list[StepSeconds]:
    """Return the parts of every decision, each with the moves of what arrives at it."""
    space, more = memory.space, memory.accumulation
    found: list[StepSeconds] = []

    def seconds_of(transfer: Transfer, message: Message | None) -> float:
        return transfer_seconds(transfer, space.mesh, space.hardware, message)

    for number, (decision, choice) in enumerate(zip(space.decisions, choices, strict=True)):
        recomputed = memory.backward_seconds_at(number, choices, modes)
        share = space.share(space.rows.get(number), choices, imbalance)
        whole = float(decision.candidates.seconds[choice])
        if more.once(number):
            found.append(StepSeconds(0.0, 0.0, whole + recomputed))
            continue
        own = memory.second_forward.running(number, choices, modes)
        waits = sum(wait for _, wait in own.forward_collectives)
        there = float(decision.candidates.forward_seconds[choice]) + waits
        found.append(StepSeconds(there * share, (whole - there + recomputed) * share, 0.0))
    for edge in space.edges:
        path, parts = space.path(edge, choices), found[edge.target]
        share = space.share(space.rows_on(edge), choices, imbalance)
        if more.moves_once(edge) and not more.each_time(edge)[choices[edge.source], choices[edge.target]]:
            each = more.reduction_seconds(edge, choices)
            found[edge.target] = parts._replace(backward=parts.backward + each, once=parts.once + path.seconds - each)
            continue
        pairs = zip(path.transfers, path.messages, strict=True)
        back = sum(seconds_of(t, message) for t, message in pairs if t.backward)
        forward = parts.forward + (path.seconds - back) * share
        backward = parts.backward + back * share + memory.backward_seconds_at(edge, choices, modes)
        found[edge.target] = parts._replace(forward=forward, backward=backward)
    return found


def reduction_seconds(memory: MemoryModel, choices: Sequence[int]) -> float:
    """Return the seconds among those done once in which gradients are reduced that micro-batches have added up."""
    return sum(reductions_by_decision(memory, choices))


def reductions_by_decision(memory: MemoryModel, choices: Sequence[int]) -> list[float]:
    """Return the same for every decision that takes weights."""
    space, more = memory.space, memory.accumulation
    found = [0.0] * len(space.decisions)
    for edge in space.edges:
        if more.is_weight(edge) and not more.each_time(edge)[choices[edge.source], choices[edge.target]]:
            path = space.path(edge, choices)
            pairs = zip(path.transfers, path.messages, strict=True)
            every = sum(transfer_seconds(t, space.mesh, space.hardware, message) for t, message in pairs if t.backward)
            found[edge.target] += every - more.reduction_seconds(edge, choices)
    return found
