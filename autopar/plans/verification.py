"""What `plan.verify()` finds: the plan's claims computed again, and those that do not hold."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Verification:
    """What was computed again; `problems` are the claims of the plan that do not hold."""

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
