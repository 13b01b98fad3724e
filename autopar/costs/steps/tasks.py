"""Tasks put down as a rank issues them: what computes, collectives, and who waits for which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.costs.hardware.collectives import Transfer, collective_seconds, copy_seconds, lateness, ports_used
from autopar.costs.hardware.profile import Hardware
from autopar.costs.timeline.values import COMPUTE, Task
from autopar.ir.sharding.mesh import Mesh


def checking(collective: str, mesh: Mesh, axis: str, hardware: Hardware) -> float:
    """Return the seconds of the host that checks a collective, one rank of its group after another.

    Messages between two ranks are not checked (PyTorch, ProcessGroupWrapper.cpp, `runCollectiveChecks`).
    """
    ranks = math.prod(mesh.sizes[position] for position in mesh.positions(axis))
    return 0.0 if collective == "permute" else hardware.collective_check_s * ranks


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

    def compute(self, name: str, seconds: float, row: str, launches: int = 1, host: float = 0.0) -> None:
        """Append a computation behind all that is waited for; its launch takes `host` more seconds."""
        after, self._awaited = tuple(sorted(self._awaited)), set()
        self._computed = len(self.found)
        launch = launches * self.hardware.launch_s + host
        self.found.append(Task(name, COMPUTE, seconds, self.phase, launch, after, row=row))

    def issue(
        self,
        transfer: Transfer,
        row: str,
        stream: str = "",
        times: float = 1.0,
        late: float = 0.0,
        weights: bool = False,
        begun: bool = False,
        launches: int = 1,
        of_sums: bool = False,
    ) -> int:
        """Issue a collective that overlaps with later tasks; return the number to wait for.

        It takes `times` its own seconds, without what the device rearranges for it. The rest of one that has `begun` is
        not checked again. Several that follow one another are one task of so many `launches`.
        """
        alone = collective_seconds(transfer.collective, transfer.num_bytes, self.mesh, transfer.axis, self.hardware)
        seconds = float(alone) * times
        check = 0.0 if begun else checking(transfer.collective, self.mesh, transfer.axis, self.hardware)
        after = self._awaited if self._computed is None else {*self._awaited, self._computed}
        links = ports_used(transfer, self.mesh, self.hardware)
        self.found.append(
            Task(
                *(transfer.collective, stream or transfer.axis, seconds, self.phase),
                *((self.hardware.launch_s + late + check) * launches, tuple(sorted(after)), transfer.axis, links),
                num_bytes=round(transfer.num_bytes * min(times, launches)),
                late=late * launches,
                row=row,
                weights=weights,
                of_sums=of_sums,
            )
        )
        return len(self.found) - 1

    def overlapped(
        self,
        name: str,
        stream: str,
        seconds: float,
        row: str,
        after: Sequence[int] = (),
        behind: Sequence[int] = (),
    ) -> int:
        """Add a task that takes no time of the device, after these ones, and return its number.

        It is `behind` others besides.
        """
        computed = self._awaited if self._computed is None else {*self._awaited, self._computed}
        before = tuple(sorted({*(after or computed), *behind}))
        self.found.append(Task(name, stream, seconds, self.phase, 0.0, before, row=row, overlapped=True))
        return len(self.found) - 1

    def wait(self, numbers: Iterable[int]) -> None:
        """Compute nothing further before these have ended."""
        self._awaited.update(numbers)

    def move(
        self, transfers: Sequence[Transfer], row: str, times: float = 1.0, exposed: float = 1.0, launches: int = 1
    ) -> None:
        """Add collectives that are exposed, one after the other; the host launches each of them last.

        The device's copies for them are computed before and behind each.
        `exposed` is their exposed share: collectives overlapped with compute also overlap their waits for hosts.
        """
        for transfer in transfers:
            late = lateness(self.mesh, transfer.axis, self.hardware) * exposed
            self._copy("pack", transfer.packed, row, times)
            self.wait([self.issue(transfer, row, times=times, late=late, begun=exposed < 1, launches=launches)])
            self._copy("unpack", transfer.unpacked, row, times)

    def _copy(self, name: str, num_bytes: int, row: str, times: float) -> None:
        if num_bytes:
            self.compute(name, copy_seconds(num_bytes, self.hardware) * times, row)
