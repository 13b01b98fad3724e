"""The predictions of a plan at other sizes."""

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
