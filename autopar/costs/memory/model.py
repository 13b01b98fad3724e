"""Memory model: bytes per device of each choice, by decision and by edge.

A parameter holds itself and its gradient in its storage layout, and its optimizer state and master copy unless these
are on the host. `saved_bytes` says what is saved between forward and backward, `resident_parts` adds weights and their
gradients in transit, and `live` says what is alive in a program without gradients. All this is for one micro-batch. If
a step has several, `microbatches` says what is resident in addition, and instead.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.costs.memory.host_copies import HostCopies
from autopar.costs.memory.lifetimes import Lifetimes, Place, ends_of
from autopar.costs.memory.live import Live
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.moments import Presence
from autopar.costs.memory.saved_bytes import SavedBytes
from autopar.costs.memory.tensor_bytes import Bytes, Modes, OfTensors, TensorBytes
from autopar.costs.pricing.optimizer_step import step_working_bytes
from autopar.costs.space.space import Space
from autopar.ir.program.recompute_segments import MODES, RECOMPUTATIONS


class MemoryModel(OfTensors):
    """The parts of the model, and bytes that are resident permanently or while the optimizer steps.

    Parts know those that they are made of, and none that are made of them. Equal calls share their arrays, which must
    not be changed.
    """

    def __init__(
        self,
        space: Space,
        microbatches: Microbatches | None = None,
        prefetch: int = 0,
        offloads: bool = False,
        tensors: TensorBytes | None = None,
    ) -> None:
        """`offloads`: what segments save for their backward may leave for the host.

        `tensors` are those of the space, if they are known.
        """
        super().__init__(tensors or TensorBytes(space, Lifetimes(space, MODES if offloads else RECOMPUTATIONS)))
        self.stepping = self._stepping()
        """Parameter → working bytes of its step, besides what it updates: in the backward, or the most behind it."""
        works = bool(self.stepping) and not space.optimizer.in_backward
        self.microbatches = replace(microbatches or Microbatches(), works=works)
        self.saved = SavedBytes(self.tensors, self.microbatches)
        self.second_forward, self.accumulation = self.saved.second_forward, self.saved.accumulation
        self.host_copies = HostCopies(self.saved)
        self.live = None if space.program.learns or self.microbatches.several else Live(self.tensors)
        """Lifetimes in a forward-only program, instead of tensors that are saved for a backward; None in others."""
        self.presence = Presence(self.lifetimes, self.microbatches, space.optimizer, self.stepping, prefetch)

    @property
    def prefetch(self) -> int:
        """Number of layers ahead of their use that weights are fetched."""
        return self.presence.prefetch

    def fetching_ahead(self, prefetch: int) -> MemoryModel:
        """Return the same model of plans that fetch weights so many layers ahead; it shares all arrays."""
        if prefetch == self.prefetch:
            return self
        other = copy.copy(self)
        other.presence = Presence(self.lifetimes, self.microbatches, self.space.optimizer, self.stepping, prefetch)
        return other

    def on(self, space: Space) -> MemoryModel:
        """Return the same model on another space of the same calls; with all arrays if only moves cost otherwise."""
        is_alike = space.moves_alike(self.space) and not self.accumulation.may_reduce_each
        tensors = TensorBytes(space, self.lifetimes, self.tensors if is_alike else None)
        return MemoryModel(space, self.microbatches, self.prefetch, tensors=tensors)

    def widened(self) -> MemoryModel:
        """Return the same model on the space before it was narrowed."""
        return self if self.space.kept is None else self.on(self.space.widened()[0])

    def backward_seconds(self, place: Place) -> Modes | None:
        """Return the seconds that a mode adds on account of a call or an edge: of what runs again, or of host copies.

        None if there are none in any mode.
        """
        again, copying = self.second_forward.seconds_of(place), self.host_copies.seconds_of(place)
        if copying is None:
            return again
        return (*(again or (self.tensors.nothing(copying.shape),) * len(MODES))[:-1], copying)

    def backward_seconds_at(self, place: Place, choices: Sequence[int], modes: Mapping[str, str]) -> float:
        """Return these seconds under choices and modes."""
        ends = ends_of(place)
        mode = self.lifetimes.mode_of(ends[-1], modes)
        found = self.backward_seconds(place) if mode else None
        return 0.0 if found is None else float(found[mode][tuple([choices[end] for end in ends])])

    # Permanently resident bytes.

    def stored(self, number: int) -> dict[str, Bytes]:
        """Return the bytes of a parameter, buffer or input by what they are; the arrays have one entry per strategy."""
        decision, runs = self.space.decisions[number], self.microbatches
        if decision.kind not in ("parameter", "buffer", "input") or self.accumulation.is_received(number):
            return {}
        found = self.tensors.whole(decision)
        if decision.kind != "parameter":  # the inputs of all micro-batches are there
            count = runs.count if decision.kind == "input" else 1
            return {"buffers and inputs": self.tensors.applied(np.multiply, found, count)}
        older = {"older weights": found} if runs.saves_older and decision.node.meta["tensor"].requires_grad else {}
        on_device = self.space.optimizer.offload is None
        return {"parameters": found, **older, **(self.tensors.optimizer_state(number) if on_device else {})}

    def works_on(self, number: int) -> Bytes | None:
        """Return the bytes that the optimizer's step of a parameter works on; None if no moment is counted for it."""
        if number not in self.stepping:
            return None
        nothing = self.tensors.nothing((len(self.space.decisions[number].candidates.strategies),))
        return self.tensors.applied(np.add, nothing, self.stepping[number])

    def _stepping(self) -> dict[int, int]:
        space = self.space
        working = {
            number: step_working_bytes(decision.node.meta["tensor"], space.optimizer, True)
            for number, decision in enumerate(space.decisions)
            if decision.kind == "parameter" and space.is_matrix(number) and space.program.learns
        }
        most = sorted(working, key=working.__getitem__)[-1:]
        return working if space.optimizer.in_backward else {number: working[number] for number in most}
