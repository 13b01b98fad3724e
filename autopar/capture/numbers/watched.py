"""A number that tells when the user's code tests its value, as a branch does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from autopar.capture.python.user_code import is_users
from autopar.errors import CaptureError

TESTS = ("__bool__", "__eq__", "__ge__", "__gt__", "__hash__", "__le__", "__lt__", "__ne__", "__repr__", "__format__")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = ("__abs__", "__neg__", "__pos__", "__int__", "__float__", "__round__")
GIVING = (*UNARY, *(f"__{name}__" for name in BINARY), *(f"__r{name}__" for name in BINARY))
"""Methods that give other numbers, which are watched, too."""


def watched(number: int | float) -> int | float:
    """Return an equal number; the user's code that tests it, or what follows from it, gets a CaptureError."""
    return _KINDS[type(number)](number)


def _testing(original: Callable[..., Any]) -> Callable[..., Any]:
    def test(self: Any, *args: Any) -> Any:
        if is_users(sys._getframe(1).f_globals.get("__name__")):
            raise CaptureError("forward tests its value")
        return original(self, *args)

    return test


def _giving(original: Callable[..., Any]) -> Callable[..., Any]:
    def give(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        return watched(found) if type(found) in _KINDS else found

    return give


def _kind(base: type) -> type:
    methods = {name: _testing(getattr(base, name)) for name in TESTS}
    methods |= {name: _giving(getattr(base, name)) for name in GIVING if hasattr(base, name)}
    return type(base.__name__, (base,), methods)


_KINDS: dict[type, Any] = {base: _kind(base) for base in (int, float)}
