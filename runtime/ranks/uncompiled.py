"""Exclusion of communication with other processes from the graphs that `torch.compile` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Keep torch.compile out of a function and of all that it calls."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]
