"""Exclusion of communication with other processes from the graphs that `torch.compile` makes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Keep torch.compile out of a function and of all that it calls."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


class Uncompiled(AbstractContextManager[Any]):
    """A context manager that is entered and left out of sight of torch.compile; what runs inside is compiled."""

    @uncompiled
    def __init__(self, make: Callable[..., AbstractContextManager[Any]], *args: Any) -> None:
        self._within = make(*args)

    @uncompiled
    def __enter__(self) -> Any:
        return self._within.__enter__()

    @uncompiled
    def __exit__(self, *raised: Any) -> bool | None:
        return self._within.__exit__(*raised)
