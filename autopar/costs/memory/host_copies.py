"""Activations offloaded to the host in the mode "offload": bytes of each choice, and the seconds of their copies.

    bytes      what a call or edge saves on the device in the mode "none", less what it saves there in "offload"
    seconds    bytes / link · (exposed forward + exposed backward)
    link       the bandwidth between a device and its host, or a device's share of the host's memory where that is less
    exposed    max(0, 1 - seconds in which the segment computes in that pass / seconds in which it is copied)

Both times in the last line are those of the whole segment on one device, so that the price of a choice depends on
nothing else: layouts divide a segment's computation and its saved bytes alike. If the device is the host itself, copies
do not overlap with computation, and all of their time is exposed. The timeline of a plan says what its step takes
exactly. Expert rows count as an equal share: nothing is offloaded if a plan is made for uneven rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from autopar.costs.memory.lifetimes import Place, ends_of
from autopar.costs.memory.saved_bytes import SavedBytes
from autopar.costs.memory.tensor_bytes import Bytes, OfTensors, TensorBytes
from autopar.ir.program.recompute_segments import MODES, OFFLOAD


class HostCopies(OfTensors):
    """Bytes and seconds of offloaded activations: of what a call saves by itself, or of what an edge brings."""

    def __init__(self, saved: SavedBytes) -> None:
        super().__init__(saved.tensors)
        self._saved = saved

    def bytes_of(self, place: Place) -> Bytes | None:
        """Return the offloaded bytes of a call or an edge; None if there are none."""
        if not self.lifetimes.offloads:
            return None
        saved = self._saved.of(place)
        if saved is None or len(saved) < len(MODES) or saved[0] is saved[-1]:
            return None
        return self.tensors.applied(np.subtract, saved[0], saved[-1])

    def seconds_of(self, place: Place) -> Bytes | None:
        """Return the exposed seconds of their copies."""
        num_bytes, segment = self.bytes_of(place), self.lifetimes.segment[ends_of(place)[-1]]
        if num_bytes is None:
            return None
        return self.tensors.applied(np.multiply, num_bytes, self.exposed[segment] / self.bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a device copies to its host, or back."""
        hardware = self.space.hardware
        return min(hardware.host_link_bytes_per_s, hardware.host_memory_bytes_per_s / self.space.devices_on_host)

    def offloaded(self, place: Place, choices: Sequence[int], modes: Mapping[str, str]) -> int:
        """Return the offloaded bytes of a call or an edge under choices and modes."""
        ends = ends_of(place)
        found = self.bytes_of(place) if modes.get(self.lifetimes.segment[ends[-1]]) == OFFLOAD else None
        return 0 if found is None else int(found[tuple([choices[end] for end in ends])])

    def total(self, choices: Sequence[int], modes: Mapping[str, str]) -> int:
        """Return bytes on the host under choices and modes once the forward of a micro-batch has run."""
        if OFFLOAD not in modes.values():
            return 0
        return sum(self.offloaded(each, choices, modes) for each in (*self.lifetimes.calls, *self.space.edges))

    @cached_property
    def exposed(self) -> Mapping[str, float]:
        """Segment → how many times the seconds of one copy are exposed, on the way there and back together: 0 to 2."""
        space, _ = self.space.widened()  # it has the choices that split nothing
        if space is not self.space:
            tensors = TensorBytes(space, self.lifetimes)
            return HostCopies(SavedBytes(tensors, self._saved.accumulation.microbatches)).exposed
        if self.space.hardware.is_host:
            return dict.fromkeys(self.lifetimes.segments, 2.0)
        forward, backward, copied = (dict.fromkeys(self.lifetimes.segments, 0.0) for _ in range(3))
        for number in self.lifetimes.calls:
            segment, candidates = self.lifetimes.segment[number], self.space.decisions[number].candidates
            if not segment:
                continue
            whole = int(np.argmax(np.where(np.isfinite(candidates.seconds), candidates.forward_seconds, -1.0)))
            there, waits = float(candidates.forward_seconds[whole]), sum(candidates.strategies[whole].waits)
            forward[segment] += there
            backward[segment] += max(0.0, float(candidates.seconds[whole]) - there - waits)
        for place in (*self.lifetimes.calls, *self.space.edges):
            num_bytes, segment = self.bytes_of(place), self.lifetimes.segment[ends_of(place)[-1]]
            if segment and num_bytes is not None:  # counts the choice that splits and moves nothing
                unmoved = True if isinstance(place, int) else self.tensors.stays(place)
                copied[segment] += int(np.where(unmoved, num_bytes, 0).max()) / self.bytes_per_s
        return {
            name: max(0.0, 1 - forward[name] / seconds) + max(0.0, 1 - backward[name] / seconds) if seconds else 0.0
            for name, seconds in copied.items()
        }
