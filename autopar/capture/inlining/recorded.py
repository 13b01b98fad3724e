"""Operators that stand for something in an exported graph until it is inlined: recorded, and never run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator


class Recorded(HigherOrderOperator):
    """Called with the number of what it stands for, if there are several, and the tensors that this takes."""

    def __call__(self, *args: int | Tensor) -> Any:
        raise AssertionError("an exported graph is rewritten before it runs")
