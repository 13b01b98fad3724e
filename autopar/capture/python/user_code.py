"""Distinction of the user's code from PyTorch, NumPy, Python's own library and autopar."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

NOT_USERS = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "autopar"}


def is_users(module: str | None) -> bool:
    """Return whether a module of this name belongs to the user or to a library of models."""
    return module is not None and module.partition(".")[0] not in NOT_USERS


def where(frame: FrameType | None) -> str:
    """Return the file and line of the user's code that runs, at or above a frame."""
    found = frame
    while found is not None and not is_users(found.f_globals.get("__name__")):
        found = found.f_back
    found = found or frame
    return "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def is_installed(code: CodeType) -> bool:
    """Return whether code belongs to an installed package."""
    return "site-packages" in code.co_filename or "dist-packages" in code.co_filename
