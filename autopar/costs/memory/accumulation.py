"""Memory and once-a-step work of a stage that runs several micro-batches a step, beyond one micro-batch's own.

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

import numpy as np

from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.tensor_bytes import SAME, SLICED, Bytes, Modes, TensorBytes
from autopar.costs.space.space import TensorEdge
from autopar.ir.program.effects import constant_calls


class Accumulation:
    """Bytes of decisions and edges on account of many micro-batches; arrays as those of `TensorBytes`, and shared."""

    def __init__(self, tensors: TensorBytes, lifetimes: Lifetimes, microbatches: Microbatches) -> None:
        self.tensors, self.lifetimes, self.microbatches = tensors, lifetimes, microbatches
        self.space = tensors.space
        program = self.space.program
        self._received = frozenset(program.received)
        self._sent = frozenset(f"output:{number}" for number in range(program.num_sent))
        self._with_edge = {w.source for w in self.space.edges if self.is_weight(w)}
        several = constant_calls(program) if microbatches.several else frozenset()
        self.constants = frozenset([n for n, each in enumerate(self.space.decisions) if each.node in several])
        """Calls that give the same in every micro-batch, and shared reshards of what they give."""
        self._first_uses = self._first_uses_of_constants()

    # Once a step, or for each micro-batch.

    def is_weight(self, edge: TensorEdge) -> bool:
        """Return whether an edge brings a weight, as it is stored or cast, to a call or a shared reshard."""
        return edge.tensor.bucketed and self.space.decisions[edge.target].kind != "output"

    def moves_once(self, edge: TensorEdge) -> bool:
        """Return whether a step moves a tensor once, unless it is gathered again for the backward."""
        return self.is_weight(edge) or self.holds(edge)

    def is_cast(self, number: int) -> bool:
        """Return whether a decision casts a weight for use."""
        return self.space.decisions[number].name in self.space.weight_casts

    def once(self, number: int) -> bool:
        """Return whether a decision costs seconds once a step: an optimizer's step, a weight's cast, a loss's sum, or
        a constant.
        """
        kind = self.space.decisions[number].kind
        return kind in ("parameter", "output") or self.is_cast(number) or number in self.constants

    def each_time(self, edge: TensorEdge) -> np.ndarray:
        """Return whether each micro-batch gathers the edge's weight and reduces its gradient.

        There is an entry for each pair of strategies at its ends. It is true if the weight is gathered again for the
        backward.
        """
        return self.tensors.cached(("each time", self.space.kind(edge)), lambda: self._each_time(edge))

    def _each_time(self, edge: TensorEdge) -> np.ndarray:
        shape = tuple(len(self.space.decisions[end].candidates.strategies) for end in (edge.source, edge.target))
        if not edge.tensor.regather:
            return np.zeros(shape, dtype=bool)
        freed = np.array([not s.saved for s in self.space.decisions[edge.source].candidates.strategies])
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
        if not (self.may_reduce_each and of_weight and edge.tensor.requires_grad):
            return np.zeros((1, 1))
        return self.tensors.cached(("reduced each", self.space.kind(edge)), lambda: self._reductions(edge))

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

    # Weights and their gradients.

    def holds(self, edge: TensorEdge) -> bool:
        """Return whether a weight, a view of one, or a constant stays resident as the edge moves it.

        No micro-batch then saves it for itself.
        """
        if edge.source in self.constants:
            return True
        return self.microbatches.several and (self.is_weight(edge) or edge.tensor.view)

    def held(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a weight as it was moved, all the time."""
        if not self.holds(edge) or self.is_cast(edge.target) or edge.source in self.constants:
            return None
        return self.tensors.cached(("held", self._kind(edge)), lambda: self._held(edge))

    def _held(self, edge: TensorEdge) -> Bytes:
        before, after = self.tensors.bytes_at_ends(edge)
        stashes = self.microbatches.stashes and self.space.decisions[edge.source].kind == "parameter"
        own = (before if stashes or self.is_cast(edge.source) else np.zeros_like(before))[:, None]
        found = np.where(self.tensors.stays(edge), own, after[None, :])
        if not self.microbatches.stashes:
            return np.where(self.each_time(edge), 0, found)
        return np.where(self.each_time(edge), own, found) * self.microbatches.in_flight

    def constant(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a constant, all the time: of a copied slice, or of the whole at the first use of it."""
        if edge.source not in self.constants or edge.target in self.constants:
            return None
        is_first = edge.end in self._first_uses
        return self.tensors.cached(
            ("constant", self.space.kind(edge), is_first), lambda: self._constant(edge, is_first)
        )

    def _constant(self, edge: TensorEdge, is_first: bool) -> Bytes:
        before, after = self.tensors.bytes_at_ends(edge)
        is_view = np.isin(self.tensors.kinds(edge), (SAME, SLICED))
        found = np.where(is_view, before[:, None] * is_first, after[None, :])
        return found * (self.microbatches.in_flight if self.microbatches.stashes else 1)

    def _first_uses_of_constants(self) -> frozenset[tuple[int, int]]:
        """Return where each constant, or a view of it, goes first to what is no constant."""
        owners: dict[int, tuple[int, int]] = {}
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for edge in self.space.edges:
            if edge.source not in self.constants:
                continue
            owner, target = (
                owners.get(edge.source, (edge.source, edge.source_output)),
                self.space.decisions[edge.target],
            )
            if edge.target not in self.constants:
                found.setdefault(owner, edge.end)
            elif target.kind == "shared_reshard" or self.lifetimes.saved(target).aliases:
                owners[edge.target] = owner
        return frozenset(found.values())

    def accumulated(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a gradient to which every micro-batch adds its own."""
        if not self._has_gradient(edge):
            return None
        return self.tensors.cached(("accumulated", self._kind(edge)), lambda: self._accumulated(edge))

    def _accumulated(self, edge: TensorEdge) -> Bytes:
        dtype = edge.tensor.dtype
        whole, parts = (self.space.program.accumulates(dtype, is_reduced) for is_reduced in (False, True))
        before, after = (each // dtype.itemsize for each in self.tensors.bytes_at_ends(edge))
        before, after = before * parts.itemsize, after * whole.itemsize
        if self.space.decisions[edge.source].kind == "shared_reshard":  # if it stays unchanged, it was added up before
            return np.where(self.tensors.changes(edge) | self.tensors.reduced(edge), after[None, :], 0)
        return np.where(self.reduced_each_time(edge), before[:, None], after[None, :])

    def reduced(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a parameter's gradient at the end, as it is stored, where that is not what was added
        up.
        """
        learned = self.holds(edge) and edge.tensor.requires_grad
        if not learned or self.space.decisions[edge.source].kind != "parameter":
            return None
        return self.tensors.cached(
            ("reduced", self._kind(edge), self.is_cast(edge.target)), lambda: self._reduced(edge)
        )

    def _reduced(self, edge: TensorEdge) -> Bytes:
        before, _ = self.tensors.bytes_at_ends(edge)
        dtype, each_time = edge.tensor.dtype, self.reduced_each_time(edge)
        whole, parts = (self.space.program.accumulates(dtype, is_reduced) != dtype for is_reduced in (False, True))
        cast = self.is_cast(edge.target) or np.where(each_time, parts, whole)
        moved = self.tensors.changes(edge) | self.tensors.reduced(edge)
        return np.where(cast | (moved & ~each_time), before[:, None], 0)

    def fresh(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of the gradient that a call's backward has made, and that is yet to be added."""
        if not self._has_gradient(edge) or self.space.decisions[edge.target].kind != "call":
            return None
        return self.tensors.cached(("fresh", self._kind(edge)), lambda: self._fresh(edge))

    def _fresh(self, edge: TensorEdge) -> Bytes:
        _, after = self.tensors.bytes_at_ends(edge)
        return np.where(self.reduced_each_time(edge), 0, after[None, :])

    def arrived(self, edge: TensorEdge) -> Bytes | None:
        """Return the bytes of a gradient that one backward has reduced, to be added to those before it when that
        backward ends.
        """
        if not self._has_gradient(edge) or not (edge.tensor.regather or self.microbatches.reduce_each):
            return None
        return self.tensors.cached(("arrived", self._kind(edge)), lambda: self._arrived(edge))

    def _arrived(self, edge: TensorEdge) -> Bytes:
        before, _ = self.tensors.bytes_at_ends(edge)
        return np.where(self.reduced_each_time(edge), before[:, None], 0)

    def _has_gradient(self, edge: TensorEdge) -> bool:
        learned = edge.tensor.requires_grad and not edge.tensor.view  # counted where the views are taken
        return self.holds(edge) and learned and not self.is_cast(edge.target)

    def _kind(self, edge: TensorEdge) -> tuple[object, ...]:
        return (self.space.kind(edge), self.is_cast(edge.source), self.space.decisions[edge.source].kind)

    def gradients(self, number: int) -> Bytes | None:
        """Return the bytes of a parameter's gradient, if there before the end; of several micro-batches: of what no
        call uses.
        """
        added_up = self.microbatches.several and number in self._with_edge
        return None if added_up else self.tensors.gradients(number)

    # Messages between stages.

    def arrives(self, number: int) -> int:
        """Return how many times a buffer or input is there: the inputs of all micro-batches are."""
        return self.microbatches.count if self.space.decisions[number].kind == "input" else 1

    def is_received(self, number: int) -> bool:
        """Return whether a decision is a tensor from the previous stage."""
        return self.space.decisions[number].name in self._received

    def is_sent(self, number: int) -> bool:
        """Return whether a decision is an output that goes to the next stage."""
        return self.space.decisions[number].name in self._sent

    def buffer(self, number: int) -> Bytes | None:
        """Return the bytes that a decision receives for one micro-batch: a tensor, or the gradient of one it sends."""
        decision, is_received = self.space.decisions[number], self.is_received(number)
        if not (is_received or self.is_sent(number)):
            return None
        info = decision.node.meta["tensor"]
        if not (is_received or info.requires_grad):
            return None
        return self.tensors.times(self.tensors.elements(info, decision), info.dtype.itemsize)

    def sent(self, edge: TensorEdge) -> Modes | None:
        """Return the bytes that one micro-batch sends and no backward saves, by mode; None for what is not sent."""
        if not self.is_sent(edge.target):
            return None
        return self.tensors.modes(
            [self._sent_bytes(edge, mode) for mode in range(self.lifetimes.num_modes(edge.source))]
        )

    def _sent_bytes(self, edge: TensorEdge, mode: int) -> Bytes:
        there = self.lifetimes.saves_output(edge.source, edge.source_output, mode)
        return self.tensors.saved(edge, there)
