"""What `Plan.reprice` and `Plan.verify` answer: predictions at other sizes, and the claims that do not hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tabulate import tabulate

from autopar.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Repriced:
    """What a plan costs at other sizes, with the same choices. `print` shows a table."""

    symbols: Mapping[str, int]
    seconds: float
    flops: float
    """Floating point operations per device and step."""
    traffic: Mapping[tuple[str, str], int]
    """(collective, axis) → bytes per device and step."""
    memory: Mapping[str, int]
    """"memory" (at the moment that was the fullest), "memory/activations", "parameter_bytes", … → bytes per device."""

    def __str__(self) -> str:
        rows = [("seconds", format_seconds(self.seconds)), ("FLOPs", f"{self.flops:.3g}")]
        rows += [(f"{name} over {axis}", format_bytes(count)) for (name, axis), count in self.traffic.items()]
        rows += [(name.removesuffix("_bytes"), format_bytes(count)) for name, count in self.memory.items()]
        at = ", ".join(f"{name}={value}" for name, value in self.symbols.items())
        return f"at {at}\n{tabulate(rows, tablefmt='plain', disable_numparse=True)}"


@dataclass(frozen=True, slots=True)
class Verification:
    """Figures that were computed again; `problems` are the claims of the plan that do not hold."""

    seconds: float
    bound: float
    """Proven again: no plan takes less under the same cost model."""
    num_bytes: int
    """Peak memory per device."""
    unproven: float
    """Seconds by which the plan's bound lies above the one proven here: for them the solver's search stands alone."""
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "the plan does not hold: " + "; ".join(self.problems)
        rest = f" ({format_seconds(self.unproven)} less than the search found)" if self.unproven else ""
        return (
            f"the plan holds: {format_seconds(self.seconds)} a step, no plan takes less than "
            f"{format_seconds(self.bound)}{rest}, {format_bytes(self.num_bytes)} per device"
        )
