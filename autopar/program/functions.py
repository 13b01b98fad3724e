"""A call of a user's `autograd.Function` as one node of a graph: its own forward and its own backward run there."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Function = type[torch.autograd.Function]


@dataclass(frozen=True, slots=True, eq=False)
class FunctionCall:
    """What a node calls that stands for `function.apply`; equal ones are one object (see `function_call`).

    It takes the arguments of `apply`, and gives None in the place of outputs that are no tensors.
    """

    function: Function
    autocast: torch.dtype | None
    """The dtype of the autocast region around the call: its own operations are cast there, as in eager mode."""
    objects: tuple[tuple[int, object], ...] = ()
    """Arguments that no graph can print, by position; the node has None in their place."""

    def __call__(self, *args: Any) -> Any:
        given = list(args)
        for position, value in self.objects:
            given[position] = value
        with self._autocast(given):
            result = self.function.apply(*given)
        if isinstance(result, Tensor):
            return result
        return tuple(each if isinstance(each, Tensor) else None for each in result)

    def _autocast(self, given: list[Any]) -> contextlib.AbstractContextManager[object]:
        if self.autocast is None:
            return contextlib.nullcontext()
        kinds = [leaf.device.type for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        return torch.autocast(next((kind for kind in kinds if kind != "meta"), "cpu"), self.autocast)

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __str__(self) -> str:
        """Module and name of the class, which are the same in every process."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def __repr__(self) -> str:
        said = [str(self.autocast)] if self.autocast is not None else []
        said += [f"{position}: {type(value).__qualname__}" for position, value in self.objects]
        return f"{self}[{', '.join(said)}]" if said else str(self)


def function_call(
    function: Function, autocast: torch.dtype | None = None, objects: tuple[tuple[int, object], ...] = ()
) -> FunctionCall:
    """The one FunctionCall of these values; one that holds objects is like no other."""
    return FunctionCall(function, autocast, objects) if objects else _shared(function, autocast)


@functools.cache
def _shared(function: Function, autocast: torch.dtype | None) -> FunctionCall:
    return FunctionCall(function, autocast)
