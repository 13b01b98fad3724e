"""Deadlines of searches: a moment of `time.monotonic` that all long work checks step by step, or Ctrl-C.

A search that has a result begins nothing new once its time is over. Work that has begun by then may take a moment more,
and is broken off after that. Inside an `interruptible` block Ctrl-C ends a search as its time does.

A time limit covers all that a user requests at once: inside a `lasting` block no search has a later deadline than the
block.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from autopar.errors import TimeLimitError

NEVER = math.inf
GRACE = 1.0  # seconds beyond the deadline, at most, in which what has begun may end
ENDING = 0.95  # share of a time limit after which searches end: the rest is to write the plan
LEAST = 0.1  # least share of a time limit for searches, regardless of earlier work

_interrupted = NEVER
"""Time at which Ctrl-C was pressed."""
_listening = False
"""True if an `interruptible` block is open."""
_last: ContextVar[float] = ContextVar("last", default=NEVER)
"""The deadline of the `lasting` blocks around the caller."""
_grace: ContextVar[float] = ContextVar("grace", default=GRACE)
"""Seconds past the deadline that are left to work that has begun."""


def after(seconds: float) -> float:
    """Return the deadline in so many seconds from now, at the latest that of the `lasting` block around the caller."""
    return min(moment_in(seconds), _last.get())


def moment_in(seconds: float) -> float:
    """Return the moment in so many seconds from now, whatever is to end before."""
    return time.monotonic() + seconds


@dataclass(frozen=True, slots=True)
class Allowance:
    """The time limit of one thing that a user asks for, all that it takes together."""

    seconds: float
    until: float
    """Time at which its searches have to end."""

    @classmethod
    def from_now(cls, seconds: float) -> Allowance:
        return cls(seconds, after(ENDING * seconds))

    def searching(self, began: float = NEVER) -> contextlib.AbstractContextManager[None]:
        """Return a block that ends all searches inside in time; what was captured before may have left them little.

        What has begun by then may take a moment more. To write the plan down takes about twice as long as to lay out
        its space, which `began` at a moment and ends now.
        """
        now, spare = moment_in(0.0), (1 - ENDING) * self.seconds
        writing = min(spare, GRACE) + 2 * max(now - began, 0.0)
        end = self.until - max(writing - spare, 0.0)
        return lasting(max(end, now + LEAST * self.seconds), spare)


@contextlib.contextmanager
def lasting(until: float, beyond: float = GRACE) -> Iterator[None]:
    """End all searches inside by a moment, and what has begun so long `beyond` it, or as blocks around say, if less."""
    last, left = _last.set(min(until, _last.get())), _grace.set(min(beyond, _grace.get()))
    try:
        yield
    finally:
        _last.reset(last)
        _grace.reset(left)


@contextlib.contextmanager
def until(moment: float) -> Iterator[None]:
    """End all searches inside by a moment, though blocks around may end before: to look once more, or to write down."""
    last = _last.set(moment)
    try:
        yield
    finally:
        _last.reset(last)


def whole_is_over() -> bool:
    """Return whether the time of the `lasting` blocks around the caller is over; optional work is then left out."""
    return is_over(_last.get())


def grace() -> float:
    """Return the seconds beyond a deadline in which what has begun may end, and which a search has that begins late."""
    return _grace.get()


def is_over(deadline: float) -> bool:
    """Return whether the deadline has passed, or Ctrl-C was pressed: nothing new may begin then."""
    return time.monotonic() > min(deadline, _interrupted)


def seconds_until(deadline: float) -> float:
    """Return the seconds that are left until the deadline, at least 0."""
    return max(min(deadline, _interrupted) - time.monotonic(), 0.0)


def check(deadline: float) -> None:
    """Raise TimeLimitError where what has begun has to be broken off."""
    if time.monotonic() > min(deadline, _interrupted) + grace():
        raise TimeLimitError(nothing_found())


def check_whole() -> None:
    """Raise TimeLimitError where what has begun has to be broken off, as the `lasting` blocks around the caller end."""
    if (last := _last.get()) < NEVER:
        check(last)


def nothing_found() -> str:
    """Return the message for a search that has ended without any result."""
    return f"{why_over()} before any choice of strategies was found; give it longer, or forbid strategies."


def why_over(time_passed: str = "the time limit passed") -> str:
    """Return the reason why a search whose time is over has ended, in words."""
    return time_passed if _interrupted == NEVER else "the search was interrupted"


def is_interruptible() -> bool:
    """Return whether the caller runs inside an `interruptible` block."""
    return _listening


def interrupt() -> None:
    """End the searches of the `interruptible` block around the caller, as Ctrl-C does."""
    global _interrupted
    assert _listening, "nothing would ever search again"
    _interrupted = min(_interrupted, time.monotonic())


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the searches inside with the best that they have found; a second one is a KeyboardInterrupt.

    So is the first, where nothing was found. In threads, and where a program handles Ctrl-C itself, nothing changes.
    """
    global _interrupted, _listening
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # also in a block of a block: the outer one hears of it
        return
    signal.signal(signal.SIGINT, _handled)
    _listening = True
    try:
        yield
    except TimeLimitError as error:
        if _interrupted < NEVER:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _listening = False
        _interrupted = NEVER


def _handled(number: int, frame: object) -> None:
    if _interrupted < NEVER:
        signal.default_int_handler(number, None)
    interrupt()
