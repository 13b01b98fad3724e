"""A call of a user's `autograd.Function` as one node of a graph: its own forward and its own backward run there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

Function = type[torch.autograd.Function]


def _like_first(x: Tensor, *further: Any) -> Tensor:
    return torch.empty_like(x)


def _like_both(x: Tensor, y: Tensor, *further: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


LIGER = "liger_kernel.ops"
RESULTS: Mapping[str, Callable[..., Any]] = {
    f"{LIGER}.rms_norm.LigerRMSNormFunction": _like_first,
    f"{LIGER}.layer_norm.LigerLayerNormFunction": _like_first,
    f"{LIGER}.swiglu.LigerSiLUMulFunction": _like_first,
    f"{LIGER}.geglu.LigerGELUMulFunction": _like_first,
    f"{LIGER}.rope.LigerRopeFunction": _like_both,
}
"""Functions of libraries that launch kernels, which tensors without values do not run → what they give."""


class _WithoutValues(torch.autograd.Function):
    """Results of a Function by their shapes; its inputs count as saved for the backward."""

    @staticmethod
    def forward(ctx: Any, results: Callable[..., Any], *args: Any) -> Any:
        ctx.places = [place for place, each in enumerate(args) if isinstance(each, Tensor)]
        ctx.count = len(args)
        ctx.save_for_backward(*(args[place] for place in ctx.places))
        return results(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = [None] * (ctx.count + 1)
        for place, each in zip(ctx.places, ctx.saved_tensors, strict=True):
            found[place + 1] = torch.empty_like(each) if each.is_floating_point() else None
        return tuple(found)


def applied(function: Function, args: Sequence[Any]) -> Any:
    """Return what a Function gives; of tensors without values by RESULTS, where it is there."""
    results = RESULTS.get(f"{function.__module__}.{function.__qualname__}")
    if results is not None and any(isinstance(x, FakeTensor) or x.is_meta for x in args if isinstance(x, Tensor)):
        return _WithoutValues.apply(results, *args)
    return function.apply(*args)


@dataclass(frozen=True, slots=True, eq=False)
class FunctionCall:
    """Target of a node that stands for `function.apply`; equal ones are one object (see `function_call`).

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
            result = applied(self.function, given)
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
        """Return the module and name of the class, which are the same in every process."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def __repr__(self) -> str:
        specified = [str(self.autocast)] if self.autocast is not None else []
        specified += [f"{position}: {type(value).__qualname__}" for position, value in self.objects]
        return f"{self}[{', '.join(specified)}]" if specified else str(self)


def function_call(
    function: Function, autocast: torch.dtype | None = None, objects: tuple[tuple[int, object], ...] = ()
) -> FunctionCall:
    """Return the one FunctionCall of these values; one that holds objects is like no other."""
    return FunctionCall(function, autocast, objects) if objects else _shared(function, autocast)


@functools.cache
def _shared(function: Function, autocast: torch.dtype | None) -> FunctionCall:
    return FunctionCall(function, autocast)
