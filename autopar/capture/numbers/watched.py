"""A number that counts what forward computes of it, and refuses to tell its value where forward tests it.

A program that was captured with it holds for every value of the number: no branch, no lookup and no text of it went in.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._export import non_strict_utils

from autopar.capture.python.user_code import is_users, where
from autopar.errors import CaptureError

TESTS = ("__bool__", "__eq__", "__ge__", "__gt__", "__hash__", "__le__", "__lt__", "__ne__", "__repr__", "__format__")
LOOKING_UP = frozenset(("collections", "enum", "string"))
"""Python's own modules that test a number for the user's code."""
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = ("__abs__", "__neg__", "__int__", "__float__", "__round__")
GIVING = (*UNARY, *(f"__{name}__" for name in BINARY), *(f"__r{name}__" for name in BINARY))
"""Methods that give other numbers, which are watched, too."""


class Watch:
    """Makes numbers that are watched, and counts what forward computes of them, `min` and `max` included."""

    def __init__(self) -> None:
        self.num_computed = 0

    def of(self, number: int | float) -> int | float:
        """Return an equal number; the user's code that tests it, or what follows from it, gets a CaptureError."""
        found = _KINDS[type(number)](number)
        found.watch = self
        return found

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what `min` and `max` give of watched numbers inside, while a model is captured."""
        original = non_strict_utils._tensor_min_max

        def counted(*args: Any, **options: Any) -> Any:
            found = original(*args, **options)
            if len(args) > 1 and any(type(each) in _KINDS.values() for each in args):
                self.num_computed += 1
                return self.of((float if isinstance(found, float) else int).__pos__(found))
            return found

        with mock.patch.object(non_strict_utils, "_tensor_min_max", counted):
            yield


def _testing(original: Callable[..., Any]) -> Callable[..., Any]:
    def test(self: Any, *args: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return NotImplemented  # the tensor compares itself
        frame = sys._getframe(1)
        name = frame.f_globals.get("__name__")
        if is_users(name) or name in LOOKING_UP:
            raise CaptureError(f"forward tests its value at {where(frame).rpartition('/')[2]}")
        return original(self, *args)

    return test


def _watched_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def give(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        if type(found) not in _KINDS:
            return found
        self.watch.num_computed += 1
        return self.watch.of(found)

    return give


def _kind(base: type) -> type:
    methods = {name: _testing(getattr(base, name)) for name in TESTS}
    methods |= {name: _watched_function(getattr(base, name)) for name in GIVING if hasattr(base, name)}
    return type(base.__name__, (base,), methods)


_KINDS: dict[type, Any] = {base: _kind(base) for base in (int, float)}
