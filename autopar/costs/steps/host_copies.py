"""Host copies of segments: what they send to the host and get back, as tasks that overlap with computation.

Copies leave a call when it has run, and all of a segment's come back together. If the device is the host itself, the
copies are tasks of the computing stream, where nothing is gained by fetching ahead: each is put down in its segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.costs.memory.model import MemoryModel
from autopar.costs.steps.tasks import Tasks
from autopar.ir.program.recompute_segments import OFFLOAD

DOWN, UP = "device to host", "host to device"
"""Streams of the two directions."""


class HostCopies:
    """The copies of one step, put down as its calls are; without segments in the mode nothing is."""

    def __init__(self, memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str], tasks: Tasks) -> None:
        self._memory, self._tasks = memory, tasks
        self._bytes: dict[int, int] = {}
        """Call → bytes of what it makes and takes that leave when it has run."""
        self._whole: dict[str, int] = defaultdict(int)
        self._on_way: dict[str, list[int]] = defaultdict(list)
        self._back: dict[str, list[int]] = {}
        """Segment → what brings back what it has sent, until that is waited for."""
        self._stretches: list[str] = []
        """Segments in the order in which they have begun, and "" where calls belong to none."""
        if OFFLOAD not in modes.values():
            return
        copies, lifetimes = memory.host_copies, memory.lifetimes
        self._bytes = {number: copies.offloaded(number, choices, modes) for number in lifetimes.calls}
        for edge in memory.space.edges:
            if num_bytes := copies.offloaded(edge, choices, modes):
                self._bytes[lifetimes.calls[lifetimes.position[edge.target]]] += num_bytes
        for number, num_bytes in self._bytes.items():
            if num_bytes:
                self._whole[lifetimes.segment[number]] += num_bytes

    def enter(self, number: int) -> None:
        """Start a call; a new segment first waits for the copies of the segment before the last one."""
        segment = self._memory.lifetimes.segment[number]
        if self._whole and not self._memory.accumulation.is_cast(number) and self._stretches[-1:] != [segment]:
            self._stretches.append(segment)
            self._tasks.wait(self._on_way.get(self._stretches[-3], ()) if len(self._stretches) > 2 else ())

    def send(self, number: int) -> None:
        """End a call, and copy its offloaded tensors."""
        if num_bytes := self._bytes.get(number):
            seconds, segment = num_bytes / self._memory.host_copies.bytes_per_s, self._memory.lifetimes.segment[number]
            self._on_way[segment] += self._copy(DOWN, seconds, self._memory.space.decisions[number].name)

    def enter_backward(self, number: int) -> None:
        """Start the backward of a call; a new segment waits for its own tensors; a device fetches the next ones."""
        if not self._whole or self._memory.accumulation.is_cast(number):
            return
        row = self._memory.space.decisions[number].name
        own = self._memory.lifetimes.segment[number]
        fetched = (own,) if self._memory.space.hardware.is_host else (own, self._before(number, own))
        for segment in fetched:
            if self._whole.get(segment) and segment not in self._back:
                seconds = self._whole[segment] / self._memory.host_copies.bytes_per_s
                self._back[segment] = self._copy(UP, seconds, row, self._on_way.pop(segment, []))
        self._tasks.wait(self._back.get(own, ()))

    def _before(self, number: int, own: str) -> str:
        """Return the segment of the calls before those of a call's own; "" if these are the first or belong to none."""
        calls, segment = self._memory.lifetimes.calls, self._memory.lifetimes.segment
        places = range(self._memory.lifetimes.position[number] - 1, -1, -1)
        return next((found for place in places if (found := segment[calls[place]]) != own), "")

    def _copy(self, stream: str, seconds: float, row: str, behind: Sequence[int] = ()) -> list[int]:
        if self._memory.space.hardware.is_host:
            self._tasks.compute(stream, seconds, row)
            return []
        return [self._tasks.overlapped(stream, stream, seconds, row, behind=behind)]
