"""Placeholder operator for an `autograd.Function` in an exported graph, until it becomes a call of its own.

The exporter accepts operators only: while it traces, each use of a Function is the operator KEPT with a number and the
tensors, and the number says which Function was used, with which other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.inlining.recorded import Recorded
from autopar.capture.passes.traced_graph import PLAIN
from autopar.errors import CaptureError
from autopar.ir.program.autograd_function import Function, function_call

KEPT = Recorded("autopar_kept_function")


@dataclass(frozen=True, slots=True)
class KeptUse:
    """One use of a Function: its arguments flat, tensors left out."""

    function: Function
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    places: tuple[int, ...]
    """Indices of the leaves that are tensors."""

    @classmethod
    def of(cls, function: Function, args: Sequence[Any]) -> KeptUse:
        leaves, spec = pytree.tree_flatten(tuple(args))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        left = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(function, left, spec, places)

    def call(self, tensors: Sequence[Any], autocast: torch.dtype | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the node's target and arguments, with the given values in place of the tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args = list(pytree.tree_unflatten(leaves, self.spec))
        objects = [i for i, arg in enumerate(args) if not _is_printed(arg)]
        for i in objects:
            if any(isinstance(leaf, torch.fx.Node) for leaf in pytree.tree_leaves(args[i])):
                name = f"{self.function.__module__}.{self.function.__qualname__}"
                raise CaptureError(
                    f"argument {i} of the autograd.Function {name} holds tensors together with what a graph "
                    f"cannot hold ({type(args[i]).__name__}); give it the tensors apart."
                )
        target = function_call(self.function, autocast, tuple((i, args[i]) for i in objects))
        return target, tuple(None if i in objects else arg for i, arg in enumerate(args))


def _is_printed(argument: Any) -> bool:
    """Return whether a graph can hold and print an argument."""
    if type(argument) in (list, tuple):
        return all(map(_is_printed, argument))
    if type(argument) is dict:
        return all(isinstance(name, str) and _is_printed(value) for name, value in argument.items())
    return isinstance(argument, (*PLAIN, torch.fx.Node))
