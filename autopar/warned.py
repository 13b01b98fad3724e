"""Warnings that point to the user's line: the first one outside of autopar, PyTorch and the standard library."""

from __future__ import annotations

import sys
import warnings

NOT_THEIRS = frozenset(("autopar", "torch")) | (sys.stdlib_module_names - {"__main__"})
"""Top-level packages whose frames lie between the user's line and a warning."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line, or at the caller's if no line on the stack is the user's."""
    frame, level = sys._getframe(1), 2
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in NOT_THEIRS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=2 if frame is None else level)
