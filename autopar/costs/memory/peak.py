"""The live set: what a device holds while each call runs, forward and then backward, and when that is most.

    forward of call t      all that is stored, what calls up to t save for the backward, the weights of t's layer, and
                           what t works on, if it makes its gradients in the forward
    backward of call t     all that is stored, what calls up to t have saved (those after t have freed it), gradients of
                           parameters that only calls after t use, weights of t's layer that are gathered again,
                           gradients that the layer's calls after t have left to be reduced, and what t works on; a
                           segment that is computed again holds all of its own, as in both passes do the segment of t
                           and the one before it where they are sent to the host
    gathering before it    for the last call of a layer that takes such weights: these twice, as they arrive and as they
                           are used, in place of what t works on
    reducing after it      for the first call of a layer that takes weights whose gradients are reduced: these as calls
                           have made them, as they are sent, and as they arrive, and what t hands on to calls before it

With many micro-batches in a step (`microbatches`, `accumulation`) resident at all moments are also tensors saved by
micro-batches that wait for their backward, moved weights, and accumulated gradients. Places of later backwards are
counted on from those of the first.

A program without gradients has its forward alone: while a call runs, all that is stored, what is alive (`live`), and
the weights of its layer; gathering before it, for the first call of a layer that takes weights, these twice.

The optimizer's step works in place and is below the end of the backward, but for what Muon and GaLore work on: that has
a moment of its own, with all that is stored, all gradients as they are stored, and what the largest matrix takes. In
the backward a step leaves gradients of the layer that runs there, and of no other; the first call of each matrix has a
moment behind it, as if its gradient were there, and reduced, as soon as it has run. The bytes at one moment are a sum
over choices, so that "no more than the limit at moment t" is one memory row of the problem, and a necessary one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from autopar.costs.memory.microbatches import Phase
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import COMPUTING, FORWARD, GATHERING, REDUCING, UPDATING, depth_at, is_forward
from autopar.costs.memory.resident_arrays import AT_ONCE, BY_LAYER, BY_PLACE, NAMES, sums_of
from autopar.costs.plans.decision_rows import ACTIVATIONS, KEPT_WEIGHTS, Instant, MemoryUse
from autopar.ir.program.recompute_segments import OFFLOAD

Saved = TypeVar("Saved", int, np.ndarray)
END_OF_STEP = "end of the step"  # the instant of it, in timelines of many micro-batches
STEPPING = "optimizer"  # the instant of its step, where that works on more than it updates


def memory_use(
    memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], imbalance: float | None = None
) -> tuple[int, MemoryUse, int]:
    """Return the bytes at the peak, what they are at every moment, and the number of the fullest moment (see
    `moment_of`).

    `imbalance` of the rows of experts is that of the space, unless it is given. Where several backwards of a step can
    be the fullest, the timeline is that of the one that is, with the end.
    """
    moments = PlanMoments(memory, choices, modes, imbalance)
    if not memory.lifetimes.calls:
        parts = {**moments.always, **moments.buffers(memory.microbatches.phases[0])}
        return sum(parts.values()), MemoryUse(parts, ()), 0
    phases = memory.microbatches.phases
    found = [_phase_use(memory, moments, number) for number, phase in enumerate(phases) if not phase.end]
    peak, use, moment = max(found, key=lambda each: each[0])
    for number, phase in enumerate(phases):
        if not phase.end:
            continue
        parts = {name: num_bytes for name, num_bytes in moments.ending(phase).items() if num_bytes}
        end = sum(parts.values())
        timeline = (*use.timeline, Instant(STEPPING if phase.steps else END_OF_STEP, True, end))
        use = MemoryUse(use.parts if end <= peak else parts, timeline)
        peak, moment = (peak, moment) if end <= peak else (end, number * len(memory.lifetimes.calls))
    return peak, use, moment


def _phase_use(memory: MemoryModel, moments: PlanMoments, number: int) -> tuple[int, MemoryUse, int]:
    """Return the peak, the memory use and the fullest moment of one phase, as `memory_use` does for the step."""
    phases = memory.microbatches.phases
    names = [memory.space.decisions[number].name for number in memory.lifetimes.calls]
    kinds = moments.kinds(phases[number])
    totals = np.array([np.sum(list(each.values()), axis=0) for each in kinds])
    forward = totals[FORWARD] if memory.live is None else totals.max(axis=0)
    timeline = [Instant(name, False, int(n)) for name, n in zip(names, forward, strict=True)]
    after = reversed(list(zip(names, totals[:FORWARD].max(axis=0), strict=True)))
    timeline += [Instant(name, True, int(n)) for name, n in after if memory.live is None]
    kind, place = divmod(int(np.argmax(totals)), len(names))
    parts = {name: int(array[place]) for name, array in kinds[kind].items() if array[place]}
    return int(totals.max()), MemoryUse(parts, tuple(timeline)), place + (number + kind * len(phases)) * len(names)


def bytes_by_moment(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> np.ndarray:
    """Return the bytes at every moment, by its number (see `moment_of`); 0 at those that are none."""
    moments, phases = PlanMoments(memory, choices, modes), memory.microbatches.phases
    found = np.zeros((FORWARD + 1, len(phases), moments.count), dtype=np.int64)
    for number, phase in enumerate(phases):
        if phase.end:
            found[COMPUTING, number, :1] = sum(moments.ending(phase).values())
            continue
        for kind, parts in enumerate(moments.kinds(phase)):
            found[kind, number] = np.sum(list(parts.values()), axis=0)
    return found.reshape(-1)


class PlanMoments:
    """The bytes of one plan over the places of its calls."""

    def __init__(
        self, memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], imbalance: float | None = None
    ) -> None:
        self.memory, self.count = memory, len(memory.lifetimes.calls)
        self.offloaded = {name for name, mode in modes.items() if mode == OFFLOAD}
        requested = memory.space.imbalance if imbalance is None else imbalance
        uneven_share = lambda rows: memory.space.uneven_share(rows, choices, imbalance)  # noqa: E731
        found = sums_of(memory, requested > 1).at(choices, memory.lifetimes.modes_by_number(modes), uneven_share)
        self.always = {name: int(array[0]) for name, array in found.items() if name not in NAMES}
        self.always_total = sum(self.always.values())
        self.stepped, self.reduced, self.sent, *one = (int(found[name][0]) for name in AT_ONCE)
        self.received, self.returned = one
        """Receive-buffer bytes of one micro-batch: tensors from the previous stage, and gradients from the next."""
        self.by_layer = {name: found[name] for name in BY_LAYER}
        at = {name: found[name][: self.count] for name in BY_PLACE}
        self.saved, self.whole, self.fresh = at["saved"], at["whole"], at["fresh"]
        self.weights_saved, self.weights_whole = at["weights saved"], at["weights whole"]
        self.working, self.working_forward, self.handed_on = at["working"], at["working forward"], at["handed on"]
        self.unreduced, self.sent_off, self.last_made = at["unreduced"], at["sent off"], at["last made"]
        self.alive = at["alive"]
        self.born, self.arrived = (found[name][: self.count + 1] for name in ("born", "arrived"))
        arrive = memory.weights.last_gather if memory.live is None else memory.weights.first_places
        self.gathers = self._mask_at(arrive.values())
        self.reduces = self._mask_at(memory.weights.first_reduction.values())
        self.updated = np.zeros(self.count, dtype=np.int64)
        """Working bytes of the optimizer after each call's backward, if it steps in the backward."""
        for number in () if memory.microbatches.works else memory.stepping:
            if memory.lifetimes.position[number] < self.count:
                self.updated[memory.lifetimes.position[number]] += memory.stepping[number]

    def _mask_at(self, places: Iterable[int]) -> np.ndarray:
        """Return a mask over the positions of calls that is true at `places`."""
        found = np.zeros(self.count, dtype=bool)
        found[list(places)] = True
        return found

    def ending(self, phase: Phase) -> dict[str, int]:
        """Return the bytes by what they are at the end of a step, or behind it, while the optimizer steps."""
        waiting = self.buffers(phase)
        if phase.others:
            waiting |= {**self._saved(self._waiting, phase), "sent tensors": phase.others * self.sent}
        if not phase.steps:
            return {**self.always, "gradients": int(self.born.sum()) + self.reduced, **waiting}
        works_on = sum(self.memory.stepping.values())
        moved = {} if self.memory.microbatches.stashes else {"moved weights": 0}
        return {**self.always, **moved, "gradients": self.stepped - works_on, "working set": works_on, **waiting}

    def kinds(self, phase: Phase) -> tuple[dict[str, np.ndarray], ...]:
        """Return the bytes by what they are, for every kind of moment in its order; 0 of those that a forward alone has
        not.
        """
        if self.memory.live is not None:
            never = {ACTIVATIONS: np.zeros(self.count, dtype=np.int64)}
            return never, self.arriving(phase), never, never, self.alone(phase)
        behind = self.reducing(phase), self.updating(phase)
        return self.backward(phase), self.gathering(phase), *behind, self.forward(phase)

    def forward(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return the bytes by what they are, while each call runs forward."""
        found = {
            **self._always(phase),
            **self._saved(self._saved_until, phase),
            "gathered weights": self._gathered("gathered") + self._fetched_ahead(FORWARD),
            "working set": self.working_forward,
        }
        if phase.first:
            return found
        return {**found, "gradients": np.full(self.count, int(self.born.sum()))}

    def alone(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return the bytes by what they are, while each call of a forward alone runs."""
        return {
            **self._always(phase),
            ACTIVATIONS: np.cumsum(self.alive),
            "gathered weights": self._gathered("gathered") + self._fetched_ahead(FORWARD),
        }

    def arriving(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return the bytes by what they are, while weights arrive for a layer of a forward alone; 0 at other places."""
        found = self.alone(phase) | {
            "gathered weights": self._gathered("gathered") + self._gathered("copied") + self._fetched_ahead(GATHERING)
        }
        return {name: np.where(self.gathers, array, 0) for name, array in found.items()}

    def backward(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return the bytes by what they are, while each call runs backward."""
        return {
            **self._always(phase),
            "gradients": self._reduced_gradients(phase) + self._unreduced() + self.fresh,
            **self._saved(self._with_rerun, phase),
            "gathered weights": self._gathered("gathered again") + self._fetched_ahead(COMPUTING),
            "working set": self.working,
        }

    def gathering(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return the bytes by what they are, while weights are gathered again for a layer's backward; 0 at other
        places.
        """
        found = {
            **self._always(phase),
            "gradients": self._reduced_gradients(phase) + self._unreduced(),
            **self._saved(self._saved_until, phase),
            "gathered weights": self._gathered("gathered again")
            + self._gathered("copied")
            + self._fetched_ahead(GATHERING),
        }
        return {name: np.where(self.gathers, array, 0) for name, array in found.items()}

    def reducing(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return the bytes by what they are, while a layer's gradients are reduced; 0 at other places."""
        found = {
            **self._always(phase),
            "gradients": self._reduced_gradients(phase, True)
            + self._unreduced()
            + self._sums_to_layer_end(self.sent_off)
            + self.last_made,
            **self._saved(self._saved_behind, phase),
            "gathered weights": self._fetched_ahead(REDUCING),
            "working set": self.handed_on,
        }
        return {name: np.where(self.reduces, array, 0) for name, array in found.items()}

    def updating(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return the bytes by what they are, while the optimizer steps behind a call's backward; 0 at other places."""
        found = {
            **self._always(phase),
            "gradients": self._reduced_gradients(phase, True) + self._unreduced(),
            **self._saved(self._saved_behind, phase),
            "gathered weights": self._fetched_ahead(UPDATING),
            "working set": self.handed_on + self.updated,
        }
        return {name: np.where(self.updated > 0, array, 0) for name, array in found.items()}

    def _saved(self, saved_at: Callable[[np.ndarray, np.ndarray, Phase], Saved], phase: Phase) -> dict[str, Saved]:
        """Split what is saved for the backward into activations and gathered weights."""
        every = saved_at(self.saved, self.whole, phase)
        if not self.weights_whole.any():
            return {ACTIVATIONS: every}
        weights = saved_at(self.weights_saved, self.weights_whole, phase)
        return {ACTIVATIONS: every - weights, KEPT_WEIGHTS: weights}

    def _saved_until(self, saved: np.ndarray, whole: np.ndarray, phase: Phase) -> np.ndarray:
        """Return the bytes saved up to each place."""
        return np.cumsum(saved) + self._offloaded_on_device(2, saved, whole) + self._waiting(saved, whole, phase)

    def _with_rerun(self, saved: np.ndarray, whole: np.ndarray, phase: Phase) -> np.ndarray:
        """Return the bytes saved up to each place, with all of the segment there if it is computed again."""
        return (
            self._computed_again(saved, whole)
            + self._offloaded_on_device(1, saved, whole)
            + self._waiting(saved, whole, phase)
        )

    def _saved_behind(self, saved: np.ndarray, whole: np.ndarray, phase: Phase) -> np.ndarray:
        """Return the bytes that are still saved once the backward of each place has run."""
        return self._with_rerun(saved, whole, phase) - whole

    def _computed_again(self, kept_here: np.ndarray, whole_here: np.ndarray) -> np.ndarray:
        """Return the bytes saved up to each position; a recomputed segment counts in full while it runs again."""
        segments, runs = self.memory.lifetimes.segments_at
        saved, whole = (np.concatenate([[0], np.cumsum(each)]) for each in (kept_here, whole_here))
        is_again = np.zeros(len(self.memory.lifetimes.segments) + 1, dtype=bool)  # the last: of calls without one
        is_again[segments[self.saved != self.whole]] = True
        return np.where(is_again[segments], saved[runs] + whole[1:] - whole[runs], saved[1:])

    def _offloaded_on_device(self, count: int, saved: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Return the offloaded bytes that are still on the device at each position.

        These are the bytes of the previous segment and, with `count` 2, of the position's own.
        """
        found = np.zeros(self.count, dtype=np.int64)
        if not self.offloaded:
            return found
        there: dict[str, int] = defaultdict(int)
        for place, (own, before) in enumerate(self.memory.lifetimes.near):
            if own in self.offloaded:
                there[own] += int(whole[place] - saved[place])
            found[place] = sum(there[each] for each in (before, own)[:count] if each in self.offloaded)
        return found

    def _waiting(self, saved: np.ndarray, whole: np.ndarray, phase: Phase) -> int:
        """Return the bytes that the other micro-batches save for their backward."""
        return phase.others * int(saved.sum())

    def _always(self, phase: Phase) -> dict[str, np.ndarray]:
        between = {"sent tensors": (phase.others + 1) * self.sent} if self.sent else {}
        between |= self.buffers(phase)
        return {name: np.full(self.count, num_bytes) for name, num_bytes in {**self.always, **between}.items()}

    def buffers(self, phase: Phase) -> dict[str, int]:
        """Return bytes of receive buffers in a phase, if there are any."""
        inputs, gradients = self.memory.microbatches.received(phase)
        found = inputs * self.received + gradients * self.returned
        return {"receive buffers": found} if found else {}

    def _reduced_gradients(self, phase: Phase, reducing: bool = False) -> np.ndarray:
        """Gradients, once reduced, of what is first used behind each place; while they are reduced, from it on."""
        if self.memory.frees_gradients:  # those of other layers are freed
            return self._sums_to_layer_end(self.born[:-1]) - (0 if reducing else self.born[:-1])
        born, arrived = (np.cumsum(each[::-1])[::-1] for each in (self.born, self.arrived))
        there = born if phase.first else born[0] + arrived
        return there[:-1] if reducing else there[1:]

    def _unreduced(self) -> np.ndarray:
        """Return the unreduced gradient bytes made by the calls after each position, within its layer."""
        return self._sums_to_layer_end(self.unreduced) - self.unreduced

    def _sums_to_layer_end(self, gradients: np.ndarray) -> np.ndarray:
        """Return the sum of `gradients` over the calls from each position on, within its layer."""
        order, before = self.memory.lifetimes.from_the_end
        sums, found = np.concatenate([[0], np.cumsum(gradients[order])]), np.empty(self.count, dtype=np.int64)
        found[order] = sums[1:] - sums[before]
        return found

    def _gathered(self, name: str) -> np.ndarray:
        return self.by_layer[name][self.memory.lifetimes.layers_at]

    def _fetched_ahead(self, kind: int) -> np.ndarray:
        """Weights that are fetched ahead, at moments of a kind."""
        forward = is_forward(self.memory, kind)
        return self.memory.weights.bytes_ahead(
            self.by_layer["on way" if forward else "on way again"], forward, depth_at(self.memory, kind)
        )
