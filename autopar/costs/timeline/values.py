"""Values of a simulated step: what runs, on which stream, and when."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.console.tables import fitted_table, wrapped
from autopar.console.units import format_seconds

COMPUTE = "compute"
"""The stream that computes; all others are communicators, but for those of tasks that run `overlapped`."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something that a stream runs, for so many seconds where it runs alone."""

    name: str
    stream: str
    seconds: float
    phase: str = "forward"
    """"forward", "backward", "recomputation" or "optimizer"."""
    launch: float = 0.0
    """Seconds of the host, which launches it."""
    after: tuple[int, ...] = ()
    """Tasks that it waits for, by their place; all of them are before it."""
    axis: str = ""
    """The mesh axis, or joined ones, of a collective."""
    links: tuple[tuple[str, float], ...] = ()
    """The links that it loads, each with the share of a device's port that it takes where it runs alone."""
    num_bytes: int = 0
    """Bytes of a collective, in NCCL's convention."""
    overlapped: bool = False
    """True if the task takes nothing of the device, although its stream does not compute: copies, and work of hosts."""
    row: str = ""
    """The decision that it belongs to."""
    weights: bool = False
    """True if it is a collective of weights, or of their gradients, in messages of several."""
    of_sums: bool = False
    """True if it reduces gradients that micro-batches have added up: the step waits for it, not the backward."""
    late: float = 0.0
    """Seconds of `launch` in which it waits for the host of its group that comes last."""

    def __post_init__(self) -> None:
        assert self.seconds >= 0 and self.launch >= 0, f"{self.name}: {self.seconds} s, launched in {self.launch} s"


@dataclass(frozen=True, slots=True)
class Event:
    """A task with the seconds from the step's begin at which it starts and ends."""

    task: Task
    start: float
    end: float
    waited: float = 0.0
    """Seconds that computing has lost to the task, if it does not compute itself (`simulation`)."""

    @property
    def is_collective(self) -> bool:
        return self.task.stream != COMPUTE and not self.task.overlapped


LONGEST = 5
"""Tasks that the text of a timeline names."""


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """A simulated step: the events of its tasks in their order, and where its seconds go.

    `seconds` = `computing` + `waiting` + `launching`.
    """

    events: tuple[Event, ...]
    seconds: float
    launching: float
    """Seconds in which nothing runs, as nothing has been launched."""

    def __repr__(self) -> str:
        return f"Timeline({len(self.events)} events on {len(self.streams)} streams, {format_seconds(self.seconds)})"

    def __str__(self) -> str:
        """Return a line for the step, a table of its streams, and one of its longest tasks."""
        step = (
            f"step of {format_seconds(self.seconds)}: computing {format_seconds(self.computing)}, waiting "
            f"{format_seconds(self.waiting)}, launching {format_seconds(self.launching)}; "
            f"{format_seconds(self.hidden)} of collectives hidden"
        )
        streams = []
        for name in self.streams:
            own = [each for each in self.events if each.task.stream == name]
            busy = sum(each.task.seconds for each in own)
            waited = "" if name == COMPUTE else format_seconds(sum(each.waited for each in own))
            streams.append((name, len(own), format_seconds(busy), waited))
        tasks = [
            (
                *(each.task.name, each.task.stream, each.task.phase, each.task.row),
                *map(format_seconds, (each.start, each.end - each.start)),
            )
            for each in sorted(self.events, key=lambda each: each.start - each.end)[:LONGEST]
        ]
        tables = (
            fitted_table(streams, ("stream", "tasks", "busy", "computing waits"), (1, 2, 3)),
            fitted_table(tasks, ("longest tasks", "stream", "phase", "decision", "start", "lasts"), (4, 5)),
        )
        return "\n\n".join((wrapped(step), *tables))

    @property
    def computing(self) -> float:
        """Seconds of the computing stream if it runs alone."""
        return sum(each.task.seconds for each in self.events if each.task.stream == COMPUTE)

    @property
    def lateness(self) -> float:
        """Seconds in which hosts wait for the last of their groups, whether a device waits for them or not."""
        return sum(each.task.late for each in self.events)

    @property
    def waiting(self) -> float:
        """Seconds that computing has lost to all else: nothing is computed while it runs, or more slowly."""
        return sum(each.waited for each in self.events)

    @property
    def communicating(self) -> float:
        """Seconds of all collectives if each runs alone."""
        return sum(each.task.seconds for each in self.events if each.is_collective)

    @property
    def hidden(self) -> float:
        """Return the seconds of collectives that overlap with compute, or with each other."""
        return self.communicating - sum(each.waited for each in self.events if each.is_collective)

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of all streams, the computing one first."""
        return tuple(dict.fromkeys((COMPUTE, *(each.task.stream for each in self.events))))
