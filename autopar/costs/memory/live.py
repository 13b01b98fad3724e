"""Lifetimes of tensors in a program without gradients, which saves nothing for a backward.

    made        the outputs of a call, from the call until the last consumer takes them
    moved       a tensor as a consumer takes it, where that is another one than was made
    passed on   a tensor behind a shared reshard or a view, which lies where it lay before, or, moved on its way there,
                as it has come

Permanently resident tensors (parameters, inputs, buffers) and views of them are not counted; gathered weights are
counted by layer (`resident_parts`). A tensor that is moved for its last consumer is freed before that consumer runs. If
several views of one tensor are used after it, each counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.costs.memory.moments import Part, Role
from autopar.costs.memory.tensor_bytes import Bytes, OfTensors, shared, stated_or
from autopar.costs.plans.decision_rows import ACTIVATIONS
from autopar.costs.space.space import Decision, TensorEdge
from autopar.ir.program.effects import lies_in_input
from autopar.ir.program.saved_tensors import LOSSES


class Live(OfTensors):
    """Bytes of each decision and edge, by when they are resident."""

    def made(self, number: int) -> Iterator[Part]:
        """Yield a call's outputs, up to the position of their last consumer, and the workspace of a loss.

        From there `moved` counts them, except weights.
        """
        decision = self.space.decisions[number]
        if decision.kind != "call":
            return
        call, place = decision.call, self.lifetimes.position[number]
        for output, info in enumerate(call.outputs):
            if not self._passes(number, output):
                used = bool(self.lifetimes.outgoing[number, output])
                end = self._last_use(number, output) + self.space.is_weight(number) if used else place + 1
                layouts = [strategy.outputs[output] for strategy in decision.candidates.strategies]
                yield from _alive(self.tensors.of(info, layouts), place, end, number)
        if call.target in LOSSES or self.tensors.states("inference_bytes", decision):
            yield from _alive(self._workspace(decision), place, place + 1, number)

    @shared
    def _workspace(self, decision: Decision) -> Bytes:
        """Return the bytes that a call works on besides inputs and outputs, as its implementations state.

        ATen calls of losses make the logarithms of the probabilities, as large as the logits; others need nothing.
        """
        call, stated = decision.call, self.tensors.stated("inference_bytes", decision)
        logits = call.inputs[0]
        size = max(torch.float32.itemsize, logits.dtype.itemsize) if call.target in LOSSES else 0
        layouts = tuple([strategy.inputs[0] for strategy in decision.candidates.strategies])
        return stated_or(stated, self.tensors.local(logits.shape, layouts, size))

    def moved(self, edge: TensorEdge) -> Iterator[Part]:
        """Yield an edge's tensor where its target takes it, and beyond if that passes it on."""
        if self.space.is_weight(edge.source):
            return
        place, source, ends = self._arrival(edge), (edge.source, edge.source_output), (edge.source, edge.target)
        owned, last = self._is_owned(*source), self._last_use(*source)
        is_last = next(each for each in self.lifetimes.outgoing[source] if self._arrival(each) == last) is edge
        alone = owned and is_last and self._begun(edge) < place
        after, end = max(place, last if owned else place) + 1, self._end_behind(edge)
        yield from _alive(self.tensors.arriving(edge, alone), place, place + 1, *ends)
        yield from _alive(self.tensors.arriving(edge, False), place + 1, min(after, end), *ends)
        yield from _alive(self.tensors.arriving(edge, owned), after, end, *ends)

    def _arrival(self, edge: TensorEdge) -> int:
        """Return the place at which a tensor is taken; outputs are taken when the last call has run."""
        return min(self.lifetimes.position[edge.target], len(self.lifetimes.calls) - 1)

    def _last_use(self, number: int, output: int) -> int:
        """Return the place at which the last consumer takes a tensor."""
        return max(map(self._arrival, self.lifetimes.outgoing[number, output]), default=self.lifetimes.position[number])

    def _begun(self, edge: TensorEdge) -> int:
        """Return the position up to which an edge's tensor is counted as made or as passed on."""
        inbound = self.space.inbound.get((edge.source, 0))
        if inbound is None or not self._passes(edge.source, edge.source_output):
            return -1
        return max(self._arrival(inbound), self._last_use(inbound.source, inbound.source_output))

    def _end_behind(self, edge: TensorEdge) -> int:
        """Return the place up to which a target that passes a tensor on has it; 0 where it does not."""
        target = self.space.decisions[edge.target]
        if target.kind == "shared_reshard":
            return self._last_use(edge.target, 0)
        if target.kind != "call" or edge.target_input != 0:
            return 0
        passed_on = (output for output in range(len(target.call.outputs)) if self._passes(edge.target, output))
        return max((self._last_use(edge.target, output) for output in passed_on), default=0)

    def _passes(self, number: int, output: int) -> bool:
        """Return whether an output of a decision shares memory with its first input."""
        decision = self.space.decisions[number]
        if decision.kind != "call":
            return decision.kind == "shared_reshard"
        return lies_in_input(decision.node) or output in self.lifetimes.saved(decision).aliases

    def _is_owned(self, number: int, output: int) -> bool:
        """Return whether a tensor was made by a call, and is no view of permanently resident memory."""
        inbound = self.space.inbound.get((number, 0))
        if inbound is not None and self._passes(number, output):
            return self._is_owned(inbound.source, inbound.source_output)
        return self.space.decisions[number].kind == "call"


def _alive(num_bytes: Bytes, first: int, end: int, *ends: int) -> Iterator[Part]:
    """Yield the part that is there while calls run from one place on, up to that of another, which it leaves out."""
    if first < end:
        yield Part(Role.ALIVE, ACTIVATIONS, first, (num_bytes,), ends, until=end)
