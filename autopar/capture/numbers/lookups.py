"""What a tensor does in silence and a number does by its value: to be found in a set or dict, and to be printed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopar.capture.python.user_code import is_users, where
from autopar.errors import CaptureError

LOOKING_UP = frozenset(("collections", "enum", "string"))
"""Python's own modules that do it for the user's code."""


@contextlib.contextmanager
def refuse_lookups() -> Iterator[None]:
    """Raise CaptureError inside if the user's code hashes a tensor without dims, or makes a text of it.

    `step in {100, 200}` is False for every tensor, and `weights.get(step, 1.0)` is 1.0.
    """

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(tensor: Tensor, *args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            name = frame.f_globals.get("__name__")
            if (is_users(name) or name in LOOKING_UP) and tensor.ndim == 0:
                raise CaptureError(f"forward looks its value up, or prints it, at {where(frame).rpartition('/')[2]}")
            return original(tensor, *args, **options)

        return refuse

    with (
        mock.patch.object(FakeTensor, "__hash__", refusing(FakeTensor.__hash__)),
        mock.patch.object(Tensor, "__format__", refusing(Tensor.__format__)),
        mock.patch.object(Tensor, "__repr__", refusing(Tensor.__repr__)),
    ):
        yield
