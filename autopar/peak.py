"""The live set: what a device holds while each call runs, forward and then backward, and when that is most.

    forward of call t      all that is stored, what calls up to t keep for the backward, the weights of t's layer
    backward of call t     all that is stored, what calls up to t have kept (those after t have freed it), gradients of
                           parameters that only calls after t use, the weights of t's layer and the gradients that its
                           calls from t on have left to be reduced, and the gradients that t works on; a segment that
                           is computed again holds all of its own

With many micro-batches in a step (`microbatches`, `accumulation`) all moments hold besides what those keep that wait
for their backward, weights as they were moved, and gradients that are added up. Places of later backwards are counted
on from those of the first.

The optimizer's step works in place and is below the end of the backward. The bytes at one moment are a sum over
choices, so that "no more than the limit at moment t" is one memory row of the problem, and a necessary one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.memory import MemoryModel, Modes
from autopar.microbatches import END, Phase
from autopar.plan import Instant, MemoryUse
from autopar.segments import MODES
from autopar.space import Wire

END_OF_STEP = "end of the step"  # the instant of it, in timelines of many micro-batches


@dataclass(frozen=True, slots=True)
class Row:
    """The bytes at moments of the backward (places of calls, see `_moment`), added up with whole weights.

    With `worst` it is instead the largest of them, taken for each choice by itself: a choice that fits this row fits at
    each of the moments, though not every choice that does so fits the row.
    """

    weights: tuple[tuple[int, int], ...]
    worst: bool = False

    @property
    def total(self) -> int:
        """How often the limit counts in the limit of the row."""
        return 1 if self.worst else sum(weight for _, weight in self.weights)


def node_bytes(memory: MemoryModel, number: int, row: Row) -> Modes:
    """Bytes of a decision in a row, by strategy; one array per mode of its segment where the mode matters."""
    more = memory.accumulation
    gradients, own, working = more.gradients(number), memory.own(number), memory.working(number)
    moments: list[tuple[int, list[Modes]]] = []
    for moment, weight in row.weights:
        place, phase = _moment(memory, moment)
        parts: list[Modes] = [(array,) for array in memory.stored(number).values()]
        if phase.end:
            moments.append((weight, parts if gradients is None else [*parts, (gradients,)]))
            continue
        if gradients is not None and (memory.position[number] > place or not phase.first):
            parts.append((gradients,))
        if own is not None and memory.position[number] <= place:
            parts.append(own if _frees(memory, number, place) else own[:1])
        if own is not None and phase.others:
            parts.append(more.waiting(own, phase.others))
        if working is not None and memory.position[number] == place:
            parts.append((working,))
        moments.append((weight, parts))
    shape = (len(memory.space.decisions[number].menu.strategies),)
    nothing = memory.cached(("nothing", shape), lambda: np.zeros(shape, dtype=np.int64))
    return memory.total(moments, row.worst) or (nothing,)


def wire_bytes(memory: MemoryModel, wire: Wire, row: Row) -> Modes | None:
    """Bytes of a wire in a row, by the strategies at its ends; one array per mode where the mode matters."""
    kept, gathered, unreduced = memory.wire(wire), memory.gathered(wire), memory.unreduced(wire)
    more = memory.accumulation
    held, sent, accumulated, fresh = more.held(wire), more.sent(wire), more.accumulated(wire), more.fresh(wire)
    reduced = more.reduced(wire)
    moments: list[tuple[int, list[Modes]]] = []
    for moment, weight in row.weights:
        place, phase = _moment(memory, moment)
        parts: list[Modes] = [] if held is None else [(held,)]
        if accumulated is not None and (memory.position[wire.target] > place or not phase.first):
            parts.append((accumulated,))
        if phase.end:
            moments.append((weight, parts if reduced is None else [*parts, (reduced,)]))
            continue
        if kept is not None and memory.position[wire.target] <= place:
            parts.append(kept if _frees(memory, wire.target, place) else kept[:1])
        if kept is not None and phase.others:
            parts.append(more.waiting(kept, phase.others))
        if sent is not None:
            parts.append(more.waiting(sent, phase.others + 1))
        if fresh is not None and memory.position[wire.target] == place:
            parts.append((fresh,))
        if memory.layer[wire.target] == memory.layer[memory.calls[place]]:
            if gathered is not None:
                parts.append((gathered,))
            if unreduced is not None and memory.position[wire.target] >= place:
                parts.append((unreduced,))
        moments.append((weight, parts))
    return memory.total(moments, row.worst)


def _moment(memory: MemoryModel, moment: int) -> tuple[int, Phase]:
    """The place of the call that runs backward at a moment, and which backward of the step that is."""
    number, place = divmod(moment, len(memory.calls))
    return place, memory.microbatches.phases[number]


def _frees(memory: MemoryModel, number: int, place: int) -> bool:
    """Whether recomputation helps at that moment: not while the decision's own segment is computed again."""
    return memory.segment[number] != memory.segment[memory.calls[place]]


def memory_use(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> tuple[int, MemoryUse, int]:
    """The bytes at the peak, what they are at every moment, and the moment of the backward that is the fullest.

    Where several backwards of a step can be the fullest, the timeline is that of the one that is, with the end.
    """
    moments = _Moments(memory, choices, modes)
    if not memory.calls:
        return moments.always_total, MemoryUse(moments.always, ()), 0
    phases = memory.microbatches.phases
    found = [_phase_use(memory, moments, number) for number, phase in enumerate(phases) if not phase.end]
    peak, use, moment = max(found, key=lambda each: each[0])
    if not memory.microbatches.several:
        return peak, use, moment
    parts = {**moments.always, "gradients": int(moments.born.sum()) + moments.reduced}
    parts = {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
    end = sum(parts.values())
    timeline = (*use.timeline, Instant(END_OF_STEP, True, end))
    if end <= peak:
        return peak, MemoryUse(use.parts, timeline), moment
    return end, MemoryUse(parts, timeline), phases.index(END) * len(memory.calls)


def _phase_use(memory: MemoryModel, moments: _Moments, number: int) -> tuple[int, MemoryUse, int]:
    """What `memory_use` finds in one phase."""
    phase = memory.microbatches.phases[number]
    names = [memory.space.decisions[number].name for number in memory.calls]
    forward, backward = moments.forward(phase), moments.backward(phase)
    forward_totals, backward_totals = (np.sum(list(each.values()), axis=0) for each in (forward, backward))
    timeline = [Instant(name, False, int(n)) for name, n in zip(names, forward_totals, strict=True)]
    timeline += [Instant(name, True, int(n)) for name, n in reversed(list(zip(names, backward_totals, strict=True)))]
    place = int(np.argmax(backward_totals))
    top = backward if backward_totals[place] >= forward_totals.max() else forward
    at = place if top is backward else int(np.argmax(forward_totals))
    parts = {name: int(array[at]) for name, array in top.items() if array[at]}
    moment = place + number * len(names)
    return max(each.num_bytes for each in timeline), MemoryUse(parts, tuple(timeline)), moment


class _Moments:
    """The bytes of one plan over the places of its calls."""

    def __init__(self, memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> None:
        space, count = memory.space, len(memory.calls)
        self.count = count
        self.always: dict[str, int] = defaultdict(int)
        self.kept, self.whole = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        """Kept for the backward by place of use: as the modes say, and as without recomputation."""
        self.born = np.zeros(count + 1, dtype=np.int64)
        self.outputs = np.zeros(count, dtype=np.int64)
        self.layers = [memory.layer[number] for number in memory.calls]
        self.segments = [memory.segment[number] for number in memory.calls]
        self.of_layer: dict[str, int] = defaultdict(int)
        self.unreduced = np.zeros(count, dtype=np.int64)
        self.fresh = np.zeros(count, dtype=np.int64)
        self.reduced = self.sent = 0
        """Bytes of gradients that are reduced at the end; of what one micro-batch has sent."""
        more = memory.accumulation
        mode_of = {name: MODES.index(mode) for name, mode in modes.items()}
        for number, choice in enumerate(choices):
            place = memory.position[number]
            for name, array in memory.stored(number).items():
                self.always[name] += int(array[choice])
            gradients, own, working = more.gradients(number), memory.own(number), memory.working(number)
            if gradients is not None:
                self.born[min(place, count)] += int(gradients[choice])
            if own is not None and place < count:
                self._keep(place, own, mode_of.get(memory.segment[number], 0), (choice,))
            if working is not None:
                self.outputs[place] += int(working[choice])
        for wire in space.wires:
            ends, place = (choices[wire.source], choices[wire.target]), memory.position[wire.target]
            sent, held, accumulated = more.sent(wire), more.held(wire), more.accumulated(wire)
            fresh, reduced = more.fresh(wire), more.reduced(wire)
            if sent is not None:
                mode = mode_of.get(memory.segment[wire.source], 0)
                self.sent += int(sent[min(mode, len(sent) - 1)][ends])
            if held is not None:
                self.always["moved weights"] += int(held[ends])
            if accumulated is not None:
                self.born[min(place, count)] += int(accumulated[ends])
            if reduced is not None:
                self.reduced += int(reduced[ends])
            if place >= count:
                continue
            if fresh is not None and memory.space.decisions[wire.target].kind == "call":
                self.fresh[place] += int(fresh[ends])
            kept, gathered, unreduced = memory.wire(wire), memory.gathered(wire), memory.unreduced(wire)
            if kept is not None:
                self._keep(place, kept, mode_of.get(memory.segment[wire.target], 0), ends)
            if gathered is not None:
                self.of_layer[memory.layer[wire.target]] += int(gathered[ends])
            if unreduced is not None:
                self.unreduced[place] += int(unreduced[ends])
        self.always_total = sum(self.always.values())

    def _keep(self, place: int, modes: Modes, mode: int, ends: tuple[int, ...]) -> None:
        self.kept[place] += int(modes[min(mode, len(modes) - 1)][ends])
        self.whole[place] += int(modes[0][ends])

    def forward(self, phase: Phase) -> dict[str, np.ndarray]:
        """Bytes by what they are, while each call runs forward."""
        found = {
            **self._always(phase),
            "activations": np.cumsum(self.kept) + self._waiting(phase),
            "gathered weights": self._gathered(),
        }
        if phase.first:
            return found
        return {**found, "gradients": np.full(self.count, int(self.born.sum()))}

    def backward(self, phase: Phase) -> dict[str, np.ndarray]:
        """Bytes by what they are, while each call runs backward."""
        kept, whole = np.cumsum(self.kept), np.cumsum(self.whole)
        activations = kept.copy()
        again = {s for s, one, other in zip(self.segments, self.kept, self.whole, strict=True) if s and one != other}
        before_kept = before_whole = 0
        for place, segment in enumerate(self.segments):
            if place and segment != self.segments[place - 1]:
                before_kept, before_whole = kept[place - 1], whole[place - 1]
            if segment in again:
                activations[place] = before_kept + whole[place] - before_whole
        born = np.cumsum(self.born[::-1])[::-1]
        there = born[1:] if phase.first else np.full(self.count, born[0])
        return {
            **self._always(phase),
            "gradients": there + self._unreduced() + self.fresh,
            "activations": activations + self._waiting(phase),
            "gathered weights": self._gathered(),
            "working set": self.outputs,
        }

    def _waiting(self, phase: Phase) -> int:
        """What the other micro-batches keep for their backward."""
        return phase.others * int(self.kept.sum())

    def _always(self, phase: Phase) -> dict[str, np.ndarray]:
        sent = {"sent tensors": (phase.others + 1) * self.sent} if self.sent else {}
        return {name: np.full(self.count, num_bytes) for name, num_bytes in {**self.always, **sent}.items()}

    def _unreduced(self) -> np.ndarray:
        """Gradients that the calls of a layer, from the last one back to each place, have left."""
        left: dict[str, int] = defaultdict(int)
        found = np.zeros(self.count, dtype=np.int64)
        for place in reversed(range(self.count)):
            left[self.layers[place]] += int(self.unreduced[place])
            found[place] = left[self.layers[place]]
        return found

    def _gathered(self) -> np.ndarray:
        return np.array([self.of_layer[layer] for layer in self.layers], dtype=np.int64)
