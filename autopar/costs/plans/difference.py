"""Differences between two plans, from the plans alone: step, memory, traffic, and the choices.

Choices are compared for each decision whose name is in both plans, on the mesh axes that both have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.console.tables import fitted_table, wrapped
from autopar.console.units import format_bytes, format_seconds

MAX_LINES = 40  # lines in the table of choices
MAX_SHARE = 9.0  # above which a difference is called a multiple
TOLERANCE = 1e-9  # relative difference of seconds that are summed in another order


@dataclass(frozen=True, slots=True)
class Amount:
    """A number in two plans."""

    before: float
    after: float

    @property
    def delta(self) -> float:
        return self.after - self.before

    @property
    def is_equal(self) -> bool:
        return abs(self.delta) <= TOLERANCE * max(abs(self.before), abs(self.after))

    @property
    def share(self) -> float:
        """The difference as a share of what it was before; infinite where that was nothing."""
        return self.delta / self.before if self.before else float("inf") if self.after else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """Decisions of equal modules that two plans decide differently, in words."""

    module: str
    operation: str
    before: str
    after: str
    count: int
    seconds: Amount
    """Seconds of these decisions in a step, with the reshards of their inputs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Result of `Plan.diff`, from the plan it was called on (before) to the other one (after); `print` shows tables."""

    step: Amount
    bound: Amount
    memory: Amount
    traffic: Mapping[tuple[str, str], Amount]
    """(collective, axis) → bytes per device and step."""
    changes: tuple[Change, ...]
    mismatches: tuple[str, ...]
    """Differences of the two plans other than their choices: mesh, model, inputs, options."""
    axes: tuple[str, ...] = ()
    """The mesh axes that both have, on which choices are compared."""

    @property
    def is_empty(self) -> bool:
        amounts = (self.step, self.bound, self.memory, *self.traffic.values())
        return not self.changes and not self.mismatches and all(amount.is_equal for amount in amounts)

    def __str__(self) -> str:
        if self.is_empty:
            return "the plans are equal: same choices, same predictions"
        sections = [
            "\n".join(wrapped(f"not the same: {text}") for text in self.mismatches),
            self._totals(),
            self._choices(),
        ]
        return "\n\n".join(section for section in sections if section)

    def _totals(self) -> str:
        table = [
            ["step", *_seconds_words(self.step)],
            ["lower bound", *_seconds_words(self.bound)],
            ["memory", *_bytes_words(self.memory)],
            *([f"{name} {axis}", *_bytes_words(amount)] for (name, axis), amount in self.traffic.items()),
        ]
        return fitted_table(table, ["", "before", "after", "difference"], (1, 2, 3))

    def _choices(self) -> str:
        if not self.changes:
            return "no choice differs" if self.axes else ""
        table = [
            [c.module or "(model)", c.operation, c.before, c.after, c.count, signed_seconds(c.seconds.delta)]
            for c in self.changes[:MAX_LINES]
        ]
        left = self.changes[MAX_LINES:]
        if left:
            delta = signed_seconds(sum(change.seconds.delta for change in left))
            table.append([f"({len(left)} more kinds)", "", "", "", sum(change.count for change in left), delta])
        return fitted_table(table, ["module", "operation", "before", "after", "calls", "time"], (4, 5))


def share_words(amount: Amount) -> str:
    """Return a relative difference: "+1.5%", or "25 times" where a percentage is no longer read."""
    return f"{amount.share:+.1%}" if amount.share < MAX_SHARE else f"{amount.after / amount.before:.3g} times"


def signed_seconds(seconds: float) -> str:
    """Return a difference of seconds: "+1.20 ms", "-3.0 µs", "0" where it is next to nothing."""
    if abs(seconds) < 5e-8:
        return "0"
    return f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"


def signed_bytes(count: float) -> str:
    """Return a difference of bytes: "+3.00 MB", "0"."""
    return f"{'+' if count > 0 else '-'}{format_bytes(abs(count))}" if count else "0"


def _seconds_words(amount: Amount) -> tuple[str, str, str]:
    share = f" ({share_words(amount)})" if amount.before and not amount.is_equal else ""
    return format_seconds(amount.before), format_seconds(amount.after), signed_seconds(amount.delta) + share


def _bytes_words(amount: Amount) -> tuple[str, str, str]:
    share = f" ({share_words(amount)})" if amount.before and amount.delta else ""
    return (
        format_bytes(amount.before) if amount.before else "-",
        format_bytes(amount.after) if amount.after else "-",
        signed_bytes(amount.delta) + share,
    )


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a step: seconds, and bytes per device that it moves (NCCL's convention)."""

    seconds: float = 0.0
    num_bytes: int = 0
