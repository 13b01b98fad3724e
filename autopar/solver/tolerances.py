"""When a search has done enough: gaps between an answer and its bound, and the effort of long counts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autopar.console.units import format_share
from autopar.errors import warn_user
from autopar.solver.deadline import why_over

ROUNDING = 1e-9  # relative gap that counts as none: rounding of long sums
SUM_ROUNDING = 1e-12  # relative difference of two sums of the same numbers in another order
EFFORT = 1.0  # CP-SAT's deterministic seconds of one count


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Gaps, as shares of the seconds, at which a search ends; `EXACT` asks for the optimum."""

    gap: float = 0.0
    """Gap that is always enough."""
    expensive: float = 0.0
    """Gap that is enough where an evaluation of the whole takes seconds."""
    counted: float = 0.0
    """Gap at which what counts leave undecided stays so; if infinite, any does."""
    branches: bool = True
    """True if branch and bound goes on where counts leave something undecided."""
    cutoff: float = math.inf
    """Seconds of another solution: the search ends where its bound is as high."""

    def go_on(self, seconds: float, bound: float) -> bool:
        """Return whether a solution of `seconds` is too far from its bound to be left undecided."""
        return self.branches and not math.isinf(self.counted) and not is_closed(seconds, bound, self.counted)


EXACT = Tolerances()


def is_closed(seconds: float, bound: float, gap: float) -> bool:
    """Return whether `seconds` exceeds a bound by at most the relative gap; False if no solution was found yet."""
    return seconds < math.inf and seconds - bound <= gap * abs(seconds)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Give no warnings of what is not proven on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def warn_unproven(seconds: float, bound: float, why: str = "") -> None:
    """Warn that a plan is not proven best; by default since the time was over."""
    why = why or f"{why_over()} before the plan was proven best"
    share = (seconds - bound) / abs(seconds) if seconds else 0.0
    warn_user(
        f"{why}: it takes {seconds:.6g} s, and no plan takes less than {bound:.6g} s ({format_share(share)} less). "
        "Raise the time limit, or give up a little more with Search(gap=…).",
        RuntimeWarning,
    )
