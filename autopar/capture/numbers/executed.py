"""Which instructions of the user's code run while a model is captured, and whether two captures ran the same ones.

A captured program holds for every value of an input that is a tensor there: a branch on a tensor is refused. It holds
for numbers in the tensor's place, too, if the code that ran for a number also ran for the tensor, and nothing else.
`isinstance(n, int) and n > 3` is code of which a part runs for a number alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from autopar.capture.python.user_code import is_users

NOT_OF_MODELS = frozenset(("functorch", "mpmath", "optree", "sympy", "typing_extensions"))
"""Packages that PyTorch calls, with caches that make their paths differ."""
CALLING_BACK = frozenset(("importlib._bootstrap", "importlib._bootstrap_external", "logging", "warnings", "weakref"))
"""Modules that call the user's code from anywhere, for reasons that are none of the model's."""
TUPLES = "namedtuple_"
"""How `collections.namedtuple` begins the name of the module that it makes a tuple's constructor in."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a function of the user: the offsets of its instructions, and the calls that it made, in order."""

    code: CodeType
    events: list[int | Call] = field(default_factory=list)

    def apart_from(self, other: Call) -> str | None:
        """Return the first line of this call that ran and did not in `other`; None if `other` ran all of it."""
        rest, last = iter(other.events), 0
        for event in self.events:
            if not any(_covers(each, event) for each in rest):
                return self._place(event, last, other)
            last = event if isinstance(event, int) else last
        return None

    def _place(self, event: int | Call, last: int, other: Call) -> str:
        """Return the line of an event, or that inside of the call that it is, if `other` makes such a call, too."""
        if isinstance(event, int):
            last = event
        else:
            alike = (each for each in other.events if isinstance(each, Call) and each.code == event.code)
            within = next(filter(None, map(event.apart_from, alike)), None)
            if within is not None:
                return within
        line = next((line for start, end, line in self.code.co_lines() if start <= last < end), None)
        return f"{self.code.co_filename.rpartition('/')[2]}:{line or self.code.co_firstlineno}"


def _covers(event: int | Call, wanted: int | Call) -> bool:
    if isinstance(event, int) or isinstance(wanted, int):
        return event == wanted
    return event.code == wanted.code and wanted.apart_from(event) is None


def _is_of_models(module: str | None) -> bool:
    """Return whether the code of a module may be a model's."""
    name = str(module)
    return is_users(module) and name.partition(".")[0] not in NOT_OF_MODELS and not name.startswith(TUPLES)


@contextlib.contextmanager
def executed() -> Iterator[Call]:
    """Record what the user's code runs inside, in this thread."""
    root = Call(executed.__code__)
    stack = [root]
    known: dict[object, bool] = {}

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__")
        if name not in known:
            known[name] = _is_of_models(name)
        if not known[name]:
            return None
        made = Call(frame.f_code)
        if frame.f_back is None or frame.f_back.f_globals.get("__name__") not in CALLING_BACK:
            stack[-1].events.append(made)
        stack.append(made)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return step

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            stack[-1].events.append(frame.f_lasti)
        elif event == "return":
            stack.pop()
        return step

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield root
    finally:
        sys.settrace(before)
