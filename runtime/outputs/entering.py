"""Gradients that enter by an output: the ranks agree on them, and average them as DDP does.

A loss outside the module is a function of this rank's plain outputs. With the whole batch on every rank, all ranks
compute the same loss, and its gradient enters as it is. If ranks are called with their own samples, the loss of the
step is the mean of their losses: the gradient of this rank's samples is divided by the number of parts, and that of an
output that all ranks have whole is averaged. A loss that the model computes from all samples is such an output.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.derivatives import called_directly, once_differentiable
from autopar.runtime.collectives.direct import applied_eagerly
from autopar.runtime.collectives.layout_moves import raw_all_reduce, waited_for
from autopar.runtime.collectives.mesh_axes import Axis
from autopar.runtime.ranks.calls import Backwards, Values
from autopar.runtime.ranks.checksums import projections


@dataclass(frozen=True, slots=True)
class Entrance:
    """The way into the backward of one call by one of its outputs."""

    name: str
    backwards: Backwards
    part: str | None
    """The part of the output that this rank holds, "" for all of it; None if no other rank holds the same."""
    averaged: tuple[Axis, ...] = ()
    """The axes over whose ranks the loss of the step is the mean of their losses."""
    holds_own: bool = False
    """True if the output has this rank's samples alone, and not those of the other ranks on these axes."""

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the step's loss; InputError where ranks do not enter alike."""
        self.backwards.enter(self.name, lambda: self._values(gradient))
        if not self.averaged:
            return gradient
        gradient = gradient / math.prod(axis.size for axis in self.averaged)
        return gradient if self.holds_own else _sum(gradient, self.averaged)

    def _values(self, gradient: Tensor) -> Values:
        return {} if self.part is None else {self.part: {f"the gradient of {self.name}": projections(gradient)}}


def _sum(gradient: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        if gradient.ndim:
            gradient = raw_all_reduce(gradient, axis)
        else:  # not counted: plans do not price messages of a few bytes
            gradient = waited_for(torch.ops._c10d_functional.all_reduce(gradient, "sum", axis.group))
    return gradient


@called_directly
class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        return x.detach()  # no view, so that it can be written into; its version is that of `x`

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.entrance(grad), None


@called_directly
class _Averaged(_Handed):
    """Variant of `_Handed` for gradients that are summed over ranks; it has no second derivative."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.entrance(grad), None


def handed(x: Tensor, entrance: Entrance) -> Tensor:
    """Return the same tensor; the gradient that it gets from outside goes through `entrance`."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return x
    averages = bool(entrance.averaged) and not entrance.holds_own
    return applied_eagerly(_Averaged if averages else _Handed, x, entrance)
