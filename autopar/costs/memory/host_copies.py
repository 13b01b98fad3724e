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

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.costs.memory.tensor_bytes import Bytes, Modes, OfTensors, TensorBytes, shared
from autopar.costs.space.space import TensorEdge
from autopar.ir.program.recompute_segments import MODES, OFFLOAD


class HostCopies(OfTensors):
    """Bytes and seconds of offloaded activations, by decision and edge."""

    def __init__(
        self,
        tensors: TensorBytes,
        own: Callable[[int], Modes | None],
        edge: Callable[[TensorEdge], Modes | None],
        widened: Callable[[], HostCopies],
    ) -> None:
        """Take bytes saved on the device by mode (`own`, `edge`).

        `widened` gives the copies in the space before it was narrowed, which has the choices that split nothing.
        """
        super().__init__(tensors)
        self._own, self._edge, self._widened = own, edge, widened
        self._exposed: dict[str, float] = {}

    def bytes_of(self, number: int) -> Bytes | None:
        """Return the offloaded bytes that a call saves by itself; None if there are none."""
        return self._offloaded(self._own(number)) if self.lifetimes.offloads else None

    def bytes_on(self, edge: TensorEdge) -> Bytes | None:
        """Return the offloaded bytes on account of an edge; None if there are none."""
        return self._offloaded(self._edge(edge)) if self.lifetimes.offloads else None

    def _offloaded(self, saved: Modes | None) -> Bytes | None:
        if saved is None or len(saved) < len(MODES) or saved[0] is saved[-1]:
            return None
        return self._less(saved[0], saved[-1])

    @shared
    def _less(self, one: Bytes, other: Bytes) -> Bytes:
        return one - other

    def seconds_of(self, number: int) -> Bytes | None:
        """Return the exposed seconds of copies of what a call saves by itself."""
        return self._seconds(self.bytes_of(number), self.lifetimes.segment[number])

    def seconds_on(self, edge: TensorEdge) -> Bytes | None:
        """Return the exposed seconds of copies on account of an edge."""
        return self._seconds(self.bytes_on(edge), self.lifetimes.segment[edge.target])

    def _seconds(self, num_bytes: Bytes | None, segment: str) -> Bytes | None:
        return None if num_bytes is None else self._copied(num_bytes, self.exposed(segment) / self.bytes_per_s)

    @shared
    def _copied(self, num_bytes: Bytes, seconds: float) -> np.ndarray:
        return num_bytes * seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a device copies to its host, or back."""
        hardware = self.space.hardware
        return min(hardware.host_link_bytes_per_s, hardware.host_memory_bytes_per_s / self.space.devices_on_host)

    def offloaded(self, number: int, choices: Sequence[int], modes: Mapping[str, str]) -> int:
        """Return the offloaded bytes that a call saves by itself, under choices and modes."""
        found = self.bytes_of(number) if modes.get(self.lifetimes.segment[number]) == OFFLOAD else None
        return 0 if found is None else int(found[choices[number]])

    def offloaded_on(self, edge: TensorEdge, choices: Sequence[int], modes: Mapping[str, str]) -> int:
        """Return the offloaded bytes on account of an edge under choices and modes."""
        found = self.bytes_on(edge) if modes.get(self.lifetimes.segment[edge.target]) == OFFLOAD else None
        return 0 if found is None else int(found[choices[edge.source], choices[edge.target]])

    def total(self, choices: Sequence[int], modes: Mapping[str, str]) -> int:
        """Return bytes on the host under choices and modes once the forward of a micro-batch has run."""
        if OFFLOAD not in modes.values():
            return 0
        own = sum(self.offloaded(number, choices, modes) for number in self.lifetimes.calls)
        return own + sum(self.offloaded_on(edge, choices, modes) for edge in self.space.edges)

    def exposed(self, segment: str) -> float:
        """Return how many times the seconds of one copy are exposed, on the way there and back together: 0 to 2."""
        if not self._exposed:
            self._exposed = self._shares() if self.space.kept is None else self._widened()._shares()
        return self._exposed[segment]

    def _shares(self) -> dict[str, float]:
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
            copied[segment] += self._unsplit_bytes(self.bytes_of(number)) / self.bytes_per_s
        for edge in self.space.edges:
            if segment := self.lifetimes.segment[edge.target]:
                copied[segment] += self._unsplit_bytes(self.bytes_on(edge), self.tensors.stays(edge)) / self.bytes_per_s
        return {
            name: max(0.0, 1 - forward[name] / seconds) + max(0.0, 1 - backward[name] / seconds) if seconds else 0.0
            for name, seconds in copied.items()
        }

    @staticmethod
    def _unsplit_bytes(num_bytes: Bytes | None, among: np.ndarray | bool = True) -> int:
        """Return the bytes of the choice that splits nothing; on edges, among those that move nothing."""
        return 0 if num_bytes is None else int(np.where(among, num_bytes, 0).max())
