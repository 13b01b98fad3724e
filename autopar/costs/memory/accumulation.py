"""Work that a stage does once a step or for each of its micro-batches, and messages between stages.

    weights      moved (gathered, cast) once a step, and resident so all the time, unless gathered again in the
                 backward: those are moved for each micro-batch
    constants    what gives the same in every micro-batch, computed once a step, and slices of it, resident all the time
    gradients    added up in the layout in which the calls use the weight, in the dtype that `Program.accumulates` says,
                 and reduced once at the end of the step, when they are there as they are stored, too; of weights that
                 are gathered again for the backward, and with `reduce_each` of all that one message gathers from where
                 they are stored, in float32 or wider, in the layout from which they are gathered, and besides those
                 that one backward has reduced, until it ends
    in flight    all that a micro-batch saves for its backward, for each that waits
    buffers      for what micro-batches in flight receive: tensors from the stage before, until their backward, and
                 gradients of those sent, while it runs
    sent         tensors stay resident on the sender until it sends the next micro-batch's

Approximations: A shared reshard holds its weight once and accumulates its gradient once; so does each consumer for
which the weight is moved again. A cast is resident in the layout in which it is used. The tensor it was made from is
resident only for a moment, and is not counted; neither are buckets of messages and outputs for the user. Views of
weights (pieces of packed ones) that move are resident, and their gradients are accumulated, as the whole weight before
the views are taken. Views of a weight that is gathered again in the backward move for each micro-batch, and are priced
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.tensor_bytes import SLICED, Bytes, Modes, OfTensors, TensorBytes, shared
from autopar.costs.space.space import TensorEdge
from autopar.ir.program.effects import constant_calls


class Accumulation(OfTensors):
    """Decisions and edges that count once a step, or for each micro-batch: their seconds, and bytes of constants."""

    def __init__(self, tensors: TensorBytes, microbatches: Microbatches) -> None:
        super().__init__(tensors)
        self.microbatches, program = microbatches, self.space.program
        self._received = frozenset(program.received)
        self._sent = frozenset(f"output:{number}" for number in range(program.num_sent))
        self._with_edge = {w.source for w in self.space.edges if self.is_weight(w)}
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
        found = np.where(self.tensors.kinds(edge) <= SLICED, before[:, None] * is_first, after[None, :])
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

    def gradients(self, number: int) -> Bytes | None:
        """Return the bytes of a parameter's gradient, if there before the end; of several micro-batches: of what no
        call uses.
        """
        added_up = self.microbatches.several and number in self._with_edge
        return None if added_up else self.tensors.gradients(number)

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
