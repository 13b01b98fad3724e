"""Outcome of training a model both ways: equal, refused, or one of the outcomes that must not occur."""

from __future__ import annotations

import contextlib
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.errors import AutoparError
from tests.support.simulation.training import Training, fault_of

GOOD, BAD = ("equal", "refused", "unusable"), ("wrong", "internal", "hang")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a case: "equal", "refused", "unusable" (one process fails), "wrong", "internal" or "hang"."""

    kind: str
    text: str = ""
    """Description of the fault, or the error in one line."""
    details: str = ""
    """The traceback, where there is one."""
    split: float = 0.0
    """The share of the calls that the plan splits."""

    @property
    def is_bad(self) -> bool:
        return self.kind in BAD

    @property
    def cause(self) -> str:
        """Key that failures of one cause share: the class of the error and the place where it was raised."""
        places = [line.strip() for line in self.details.splitlines() if line.strip().startswith("File ")]
        others = ("/tests/", "site-packages", "lib/python")
        ours = [place for place in places if not any(each in place for each in others)]
        where = ours[-1].rpartition("/")[2].replace('", line ', ":").replace(", in ", " ") if ours else ""
        return f"{self.kind}: {self.text.split(':')[0][:60]} {where}".strip()


class OutOfTimeError(BaseException):
    """A case has taken longer than it may; no handler of Exceptions swallows it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in this thread, the main one, after so many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judged(
    alone: Callable[[], Training],
    on_ranks: Callable[[], Training],
    seconds: float = 120.0,
    relative: float = 1e-6,
    absolute: float = 1e-9,
) -> Outcome:
    """Train both ways and compare; the ranks have so many seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = alone()
        except Exception as error:
            return Outcome("unusable", _line(error), traceback.format_exc())
        if not expected.is_finite:
            return Outcome("unusable", "one process computes inf, nan or huge numbers")
        try:
            with time_limit(seconds):
                found = on_ranks()
        except OutOfTimeError:
            return Outcome("hang", f"more than {seconds:g} s", traceback.format_exc())
        except AutoparError as error:
            return Outcome("refused", _line(error), traceback.format_exc())
        except Exception as error:
            return Outcome("internal", _line(error), traceback.format_exc())
    fault = fault_of(found, expected, relative, absolute)
    return Outcome("wrong", fault, split=found.split) if fault else Outcome("equal", split=found.split)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
