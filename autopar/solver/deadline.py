"""When a search has to end: a moment of `time.monotonic`, which whatever takes long looks at step by step.

A search that has something to show begins nothing new once its time is over; what has begun by then may take a moment
more, and is broken off after that.
"""

from __future__ import annotations

import math
import time

from autopar.errors import TimeLimitError

NEVER = math.inf
NOTHING_FOUND = "the time limit passed before any choice of strategies was found; raise it, or forbid strategies."
GRACE = 1.0  # seconds beyond the deadline in which what has begun may end


def after(seconds: float) -> float:
    """The deadline in so many seconds from now."""
    return time.monotonic() + seconds


def is_over(deadline: float) -> bool:
    """Whether nothing new may begin."""
    return time.monotonic() > deadline


def seconds_until(deadline: float) -> float:
    """What is left, at least 0."""
    return max(deadline - time.monotonic(), 0.0)


def check(deadline: float) -> None:
    """Raise TimeLimitError where what has begun has to be broken off."""
    if is_over(deadline + GRACE):
        raise TimeLimitError(NOTHING_FOUND)
