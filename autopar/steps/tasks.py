"""Tasks put down as a rank issues them: what computes, collectives, and who waits for which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.hardware.collectives import Transfer, transfer_seconds
from autopar.hardware.profile import Hardware
from autopar.sharding.mesh import Mesh
from autopar.timeline.values import COMPUTE, Task


class Tasks:
    """The tasks of a step so far. A collective begins behind what has been computed before it was issued."""

    def __init__(self, mesh: Mesh, hardware: Hardware) -> None:
        self.mesh, self.hardware = mesh, hardware
        self.found: list[Task] = []
        self.phase = "forward"
        self._computed: int | None = None
        """The last task that computes."""
        self._awaited: set[int] = set()
        """Collectives that the next task that computes waits for."""

    def compute(self, name: str, seconds: float, row: str, launches: int = 1) -> None:
        """Something that computes, behind all that is waited for."""
        after, self._awaited = tuple(sorted(self._awaited)), set()
        self._computed = len(self.found)
        launch = launches * self.hardware.launch_s
        self.found.append(Task(name, COMPUTE, seconds, self.phase, launch, after, row=row))

    def issue(self, transfer: Transfer, row: str, stream: str = "", times: float = 1.0) -> int:
        """A collective that runs beside what comes next; the number to wait for. It takes `times` its own seconds."""
        seconds = transfer_seconds(transfer, self.mesh, self.hardware) * times
        after = self._awaited if self._computed is None else {*self._awaited, self._computed}
        positions = self.mesh.positions(transfer.axis)
        axes = frozenset(self.mesh.names[position] for position in positions)
        ranks = math.prod(self.mesh.sizes[position] for position in positions)
        launch = self.hardware.launch_s + (ranks - 1) * self.hardware.straggling_s
        self.found.append(
            Task(
                *(transfer.collective, stream or transfer.axis, seconds, self.phase),
                *(launch, tuple(sorted(after)), transfer.axis, axes),
                num_bytes=round(transfer.num_bytes * min(times, 1.0)),
                row=row,
            )
        )
        return len(self.found) - 1

    def wait(self, numbers: Iterable[int]) -> None:
        """Compute nothing further before these have ended."""
        self._awaited.update(numbers)

    def move(self, transfers: Sequence[Transfer], row: str, times: float = 1.0) -> None:
        """Collectives that are waited for, one after the other."""
        for transfer in transfers:
            self.wait([self.issue(transfer, row, times=times)])
