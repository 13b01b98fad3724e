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

`Accumulation` says what a stage does once a step or for each of its micro-batches:

    weights      moved (gathered, cast) once a step, and resident so all the time, unless gathered again in the
                 backward: those are moved for each micro-batch
    constants    what gives the same in every micro-batch, computed once a step, and slices of it, resident all the time
    gradients    added up in the layout in which the calls use the weight, in the dtype that `Program.accumulates` says,
                 and reduced once at the end of the step, when they are there as they are stored, too; of weights that
                 are gathered again for the backward, and with `reduce_each` of all that one message gathers from where
                 they are stored, in float32 or wider, in the layout from which they are gathered, and besides those
                 that one backward has reduced, until it ends

Approximations: A shared reshard holds its weight once and accumulates its gradient once; so does each consumer for
which the weight is moved again. A cast is resident in the layout in which it is used. The tensor it was made from is
resident only for a moment, and is not counted; neither are buckets of messages and outputs for the user. Views of
weights (pieces of packed ones) that move are resident, and their gradients are accumulated, as the whole weight before
the views are taken. Views of a weight that is gathered again in the backward move for each micro-batch, and are priced
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.costs.memory.tensor_bytes import Bytes, Modes, OfTensors, TensorBytes, shared
from autopar.costs.space.space import TensorEdge
from autopar.errors import PipelineError
from autopar.ir.program.effects import constant_calls

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
        (inputs, gradients), most = (each.received(Phase(each.in_flight - 1, False)) for each in (self, other))
        return self.in_flight <= other.in_flight and inputs <= most[0] and gradients <= most[1]

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


class Accumulation(OfTensors):
    """Decisions and edges that count once a step, or for each micro-batch: their seconds, and bytes of constants."""

    def __init__(self, tensors: TensorBytes, microbatches: Microbatches) -> None:
        super().__init__(tensors)
        self.microbatches, program = microbatches, self.space.program
        self._received = frozenset(program.received)
        self._sent = frozenset(f"output:{number}" for number in range(program.num_sent))
        several = constant_calls(program) if microbatches.several else frozenset()
        self.constants = frozenset([n for n, each in enumerate(self.space.decisions) if each.node in several])
        """Calls that give the same in every micro-batch, and shared reshards of what they give."""

    # Once a step, or for each micro-batch.

    def is_weight(self, edge: TensorEdge) -> bool:
        """Return whether an edge brings a weight, as it is stored or cast, to a call or a shared reshard."""
        return edge.tensor.bucketed and self.space.decisions[edge.target].kind != "output"

    def moves_once(self, edge: TensorEdge) -> bool:
        """Return whether a step moves a tensor once, unless it is gathered again for the backward."""
        return self.is_weight(edge) or self.holds(edge)

    def holds(self, edge: TensorEdge) -> bool:
        """Return whether a weight, a view of one, or a constant stays resident as the edge moves it.

        No micro-batch then saves it for itself.
        """
        if edge.source in self.constants:
            return True
        return self.microbatches.several and (self.is_weight(edge) or edge.tensor.view)

    def is_cast(self, number: int) -> bool:
        """Return whether a decision casts a weight for use."""
        return self.space.decisions[number].name in self.space.weight_casts

    def once(self, number: int) -> bool:
        """Return whether a decision costs seconds once a step: an optimizer's step, a weight's cast, a loss's sum, or
        a constant.
        """
        kind = self.space.decisions[number].kind
        return kind in ("parameter", "output") or self.is_cast(number) or number in self.constants

    @shared
    def each_time(self, edge: TensorEdge) -> np.ndarray:
        """Return whether each micro-batch gathers the edge's weight and reduces its gradient.

        There is an entry for each pair of strategies at its ends. It is true if the weight is gathered again for the
        backward.
        """
        source, target = (self.space.decisions[end].candidates.strategies for end in (edge.source, edge.target))
        if not edge.tensor.regather:
            return np.zeros((len(source), len(target)), dtype=bool)
        freed = np.array([not strategy.saved for strategy in source])
        return freed[:, None] & self.tensors.only_gathers(edge) & self.tensors.communicated(edge)

    @property
    def may_reduce_each(self) -> bool:
        """True if micro-batches may reduce gradients of weights that the step gathers once, on some of the paths."""
        return self.microbatches.several and self.microbatches.reduce_each

    def reduced_each_time(self, edge: TensorEdge) -> np.ndarray:
        """Return whether each micro-batch reduces the gradient of the edge's weight, by strategies at its ends."""
        return self.each_time(edge) | (self._seconds_of_each(edge) > 0)

    def reduction_seconds(self, edge: TensorEdge, choices: Sequence[int]) -> float:
        """Return the seconds in which each micro-batch reduces the gradient of a weight that the step gathers once."""
        each = self._seconds_of_each(edge)
        return float(np.broadcast_to(each, self.each_time(edge).shape)[choices[edge.source], choices[edge.target]])

    def _seconds_of_each(self, edge: TensorEdge) -> np.ndarray:
        """Return the seconds in which each micro-batch reduces the gradient of a weight that the step gathers once;
        else 0.
        """
        of_weight = self.space.decisions[edge.source].kind == "parameter" or self.is_cast(edge.source)
        may_reduce = self.may_reduce_each and of_weight and edge.tensor.requires_grad
        return self._reductions(edge) if may_reduce else np.zeros((1, 1))

    @shared
    def _reductions(self, edge: TensorEdge) -> np.ndarray:
        table = self.space.table(edge, saved=True)
        sources = [table.index[each] for each in self.space.source_layouts(edge)]
        targets = [table.column[each] for each in self.space.target_layouts(edge)]
        return np.where(self.each_time(edge), 0.0, table.reduction_seconds[np.ix_(sources, targets)])

    def shared_seconds(self, edge: TensorEdge, seconds: np.ndarray) -> np.ndarray:
        """Return the seconds of an edge for one micro-batch: its share of what is done once a step."""
        if not self.holds(edge):
            return seconds
        each = self._seconds_of_each(edge)
        return np.where(self.each_time(edge), seconds, (seconds - each) / self.microbatches.count + each)

    # Bytes.

    def constant(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a constant, all the time: of a copied slice, or of the whole at the first use of it."""
        if edge.source not in self.constants or edge.target in self.constants:
            return None
        return self._constant(edge, edge.end in self._first_uses)

    @shared
    def _constant(self, edge: TensorEdge, is_first: bool) -> Bytes:
        before, after = self.tensors.bytes_at_ends(edge)
        found = np.where(self.tensors.stays(edge), before[:, None] * is_first, after[None, :])
        return found * (self.microbatches.in_flight if self.microbatches.stashes else 1)

    @cached_property
    def _first_uses(self) -> frozenset[tuple[int, int]]:
        """First use of each constant, or of a view of it, by what is no constant."""
        owners: dict[int, tuple[int, int]] = {}
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for edge in self.space.edges:
            if edge.source not in self.constants:
                continue
            owner = owners.get(edge.source, (edge.source, edge.source_output))
            target = self.space.decisions[edge.target]
            if edge.target not in self.constants:
                found.setdefault(owner, edge.end)
            elif target.kind == "shared_reshard" or self.lifetimes.saved(target).aliases:
                owners[edge.target] = owner
        return frozenset(found.values())

    def adds_up(self, number: int) -> bool:
        """Return whether micro-batches add up a parameter's gradient where calls use it."""
        return self.microbatches.several and any(map(self.is_weight, self.lifetimes.outgoing[number, 0]))

    # Messages between stages.

    def is_received(self, number: int) -> bool:
        """Return whether a decision is a tensor from the previous stage."""
        return self.space.decisions[number].name in self._received

    def is_sent(self, number: int) -> bool:
        """Return whether a decision is an output that goes to the next stage."""
        return self.space.decisions[number].name in self._sent

    def buffer(self, number: int) -> Bytes | None:
        """Return the bytes that a decision receives for one micro-batch: a tensor, or the gradient of one it sends."""
        decision = self.space.decisions[number]
        returns = self.is_sent(number) and decision.node.meta["tensor"].requires_grad
        return self.tensors.whole(decision) if returns or self.is_received(number) else None

    def sent(self, edge: TensorEdge) -> Modes | None:
        """Return the bytes that one micro-batch sends and no backward saves, by mode; None for what is not sent."""
        if not self.is_sent(edge.target):
            return None
        there = self.lifetimes.saves_output
        modes = range(self.lifetimes.num_modes(edge.source))
        saved = [self.tensors.saved(edge, there(edge.source, edge.source_output, mode)) for mode in modes]
        return self.tensors.modes(saved)
