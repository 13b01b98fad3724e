"""Micro-batches of a step: how many one step of a stage runs, and how many are in flight at once.

The graph, and with it the space of plans, is that of one micro-batch. A micro-batch is in flight if its forward has run
and its backward has not. Several moments of a step can be the fullest:

    first     the first backward, while in_flight - 1 other micro-batches wait: gradients are made for the first time
    later     a later backward: all gradients are there, and at most min(in_flight, count - 1) - 1 others wait
    end       gradients that were added up are reduced: they are there as they were added up, and as they are stored,
              where that differs
    step      the optimizer works on more than it updates: gradients are there as they are stored, and what it works on

If a micro-batch follows every backward (in_flight < count: 1F1B), the later one is the fuller. If each micro-batch
updates the weights after its backward (PipeDream), every backward is a first one, and the others also wait at the end.

A pipeline stage has buffers for the inputs that its micro-batches in flight receive, and for the gradients of the
tensors they have sent. A schedule may receive ahead of computing; `inputs` and `gradients` are the most buffers at once
in its order. What a stage sends is freed when it sends the next micro-batch's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import PipelineError

SENT_AT_ONCE = 2
"""Micro-batches whose sent tensors a stage holds at most: one on its way, and the one that is computed meanwhile."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One backward of a step, or its end: how many other micro-batches wait for their backward, and which it is."""

    others: int
    first: bool
    end: bool = False
    steps: bool = False
    """True if the optimizer steps at this end."""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """`count` micro-batches a step, of which at most `in_flight` wait for their backward at once."""

    count: int = 1
    in_flight: int = 1
    reduce_each: bool = False
    """True if each micro-batch reduces the gradients of sharded weights (ZeRO-2), and not the step (ZeRO-1)."""
    works: bool = False
    """True if the optimizer works on more than it updates."""
    main_gradients: bool = False
    """True if gradients are added up, and last, also where a step has one micro-batch."""
    stashes: bool = False
    """True if each micro-batch saves the weights of its own forward, and is a step of the optimizer (PipeDream)."""
    inputs: int | None = None
    """Number of micro-batches whose received inputs are resident at once; None for those in flight."""
    gradients: int = 1
    """Number of micro-batches whose received gradients are resident at once."""
    saves_older: bool = False
    """True if the weights before the last update are resident, too, as they are stored (PipeDream-2BW)."""

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= self.count:
            raise PipelineError(
                f"{self.in_flight} micro-batches in flight, of {self.count} in a step; give at least 1 in flight, and "
                "no more than there are in a step."
            )

    @property
    def several(self) -> bool:
        """True if weights are moved, and gradients reduced, less often than they are used."""
        return self.count > 1 or self.main_gradients

    def received(self, phase: Phase) -> tuple[int, int]:
        """Return of how many micro-batches received inputs, and received gradients, are there in a phase."""
        inputs = self.in_flight if self.inputs is None else self.inputs
        if phase.end:
            return min(phase.others, inputs), 0
        return max(0, inputs - (self.in_flight - 1 - phase.others)), self.gradients

    def sent(self, phase: Phase) -> int:
        """Return of how many micro-batches sent tensors are there in a phase."""
        waiting = phase.others + (not phase.end)
        return waiting if self.stashes else min(waiting, SENT_AT_ONCE)

    def holds_no_more(self, other: Microbatches) -> bool:
        """Return whether equal choices hold no more than with the micro-batches of `other`."""
        (inputs, gradients), most = self._received_at_once, other._received_at_once
        return self.in_flight <= other.in_flight and inputs <= most[0] and gradients <= most[1]

    @property
    def _received_at_once(self) -> tuple[int, int]:
        return self.received(Phase(self.in_flight - 1, False))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The backwards of a step, and its end, that can be its fullest moments."""
        ends = (END,) * self.several + (STEP,) * self.works
        if not self.several:
            return (Phase(0, True), *ends)
        if self.stashes:
            others = self.in_flight - 1
            return (Phase(others, True), *(replace(each, others=others) for each in ends))
        if self.in_flight < self.count or self.main_gradients:
            return (Phase(self.in_flight - 1, False), *ends)
        return (Phase(self.count - 1, True), Phase(self.count - 2, False), *ends)


END = Phase(0, False, end=True)
STEP = Phase(0, False, end=True, steps=True)
