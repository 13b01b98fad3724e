"""Products that compute on one chunk of rows while the next one travels, in the layouts of `strategies`' rule for them.

A rank has some rows of the input and some columns of the weight: it gathers the rows of all ranks. Or it has some
features of all rows, and the rows of the weight that go with them: it reduces all rows of the result, and has its own.
The backward of either has the collective of the other. Gathered rows are kept for the weight's gradient.

Legend: M rows of one rank, n·M of all, K features, O columns; dims before the rows are left out.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, autograd
from torch.nn import functional as F

from autopar.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.axes import Axes, Axis, axes_of
from autopar.runtime.collectives.in_chunks import Chunks, arrived, start_gather, start_reduce_scatter
from autopar.strategies.rules.chunked_products import COLUMN, ROW, rows_of_chunks


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Collection[str] = (),
) -> Tensor:
    """As `aten.linear.default`. Moves, of n ranks, the input's or the output's whole rows, and again backward."""
    return _product(x, weight, bias, f"...{x.ndim - 2}", axes, zigzag)


def matmul(
    x: Tensor, other: Tensor, *, axes: Axes, sizes: Mapping[str, int], zigzag: Collection[str] = ()
) -> Tensor:
    """As `aten.matmul.default` with a matrix; moves as much as `linear`."""
    return _product(x, other.mT, None, "m", axes, zigzag)


mm = matmul


@dataclass(frozen=True, slots=True)
class _Way:
    """The axis over which rows travel, and in which chunks."""

    axis: Axis
    chunks: Chunks


def _product(x: Tensor, w_OK: Tensor, bias: Tensor | None, rows: str, axes: Axes, zigzag: Collection[str]) -> Tensor:
    shared = {factor: [name for name in axes[rows] if name in axes.get(factor, ())] for factor in (COLUMN, ROW)}
    gathers = bool(shared[COLUMN])
    (axis,) = axes_of(shared[COLUMN if gathers else ROW])
    num_rows = x.shape[-2] if gathers else x.shape[-2] // axis.size
    way = _Way(axis, Chunks(x.ndim - 2, tuple(rows_of_chunks(num_rows)), axis.size, rows in zigzag))
    if gathers:
        return _OfGathered.apply(x, w_OK, bias, way)
    out = _ThenReduced.apply(x, w_OK, way)
    return out if bias is None else out + bias


class _WeightGradient:
    """The sum over chunks, in float32 at least."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sum: Tensor | None = None

    def add(self, grad: Tensor, x: Tensor) -> None:
        """The part of a chunk of rows: [n, …, C, O] and [n, …, C, K]."""
        grad_RO, x_RK = grad.flatten(0, -2), x.flatten(0, -2)
        wide = torch.promote_types(self._dtype, torch.float32)
        if self._sum is None:
            self._sum = (grad_RO.mT @ x_RK).to(wide)
        elif wide == self._dtype:
            self._sum.addmm_(grad_RO.mT, x_RK)
        else:
            self._sum += grad_RO.mT @ x_RK

    def total(self) -> Tensor | None:
        """[O, K]; None where nothing was added."""
        return None if self._sum is None else self._sum.to(self._dtype)


class _Reduced:
    """Chunks of products on their way to the ranks that have their rows, two at a time."""

    def __init__(self, way: _Way) -> None:
        self._way = way
        self._travelling: list[Tensor] = []
        self._parts: list[Tensor] = []

    def add(self, product: Tensor) -> None:
        """The next chunk, [n, …, C, …]."""
        self._travelling.append(start_reduce_scatter(product, self._way.axis))
        if len(self._travelling) > 1:
            self._parts.append(arrived(self._travelling.pop(0)).squeeze(0))

    def arrived(self) -> Tensor:
        """This rank's rows of the sum."""
        self._parts += [arrived(each).squeeze(0) for each in self._travelling]
        return self._way.chunks.joined(self._parts)


class _OfGathered(autograd.Function):
    """x [M, K] of this rank, weight [O, K] and bias [O] of its columns → [n·M, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_OK: Tensor, bias: Tensor | None, way: _Way) -> Tensor:
        of_x, of_weight, *_ = ctx.needs_input_grad
        travelling = [start_gather(part, way.axis) for part in way.chunks.of_part(x)]
        out, gathered = None, []
        while travelling:
            x_nCK = arrived(travelling.pop(0))
            product = F.linear(x_nCK, w_OK, bias)
            out = out or way.chunks.whole(product)
            out.add(product)
            if of_weight:
                gathered.append(x_nCK)
        assert out is not None, "a rank without rows"
        ctx.save_for_backward(w_OK if of_x else None, *gathered)
        ctx.way, ctx.dtype = way, w_OK.dtype
        return out.made()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        w_OK, *gathered = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        summed, reduced = _WeightGradient(ctx.dtype), _Reduced(ctx.way)
        for number, grad_nCO in enumerate(ctx.way.chunks.of_whole(grad)):
            if of_x:
                reduced.add(grad_nCO @ w_OK)
            if of_weight:
                summed.add(grad_nCO, gathered[number])
        of_rows = reduced.arrived() if of_x else None
        return of_rows, summed.total(), grad.flatten(0, -2).sum(0) if of_bias else None, None


class _ThenReduced(autograd.Function):
    """x [n·M, K] and weight [O, K], of this rank's features → [M, O] of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_OK: Tensor, way: _Way) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        reduced = _Reduced(way)
        for x_nCK in way.chunks.of_whole(x):
            reduced.add(F.linear(x_nCK, w_OK))
        ctx.save_for_backward(x if of_weight else None, w_OK if of_x else None)
        ctx.way, ctx.dtype = way, w_OK.dtype
        return reduced.arrived()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w_OK = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        chunks, summed, of_rows = ctx.way.chunks, _WeightGradient(ctx.dtype), None
        travelling = [start_gather(part, ctx.way.axis) for part in chunks.of_part(grad)]
        rows = chunks.of_whole(x) if of_weight else iter(())
        while travelling:
            grad_nCO = arrived(travelling.pop(0))
            if of_x:
                product = grad_nCO @ w_OK
                of_rows = of_rows or chunks.whole(product)
                of_rows.add(product)
            if of_weight:
                summed.add(grad_nCO, next(rows))
        return of_rows.made() if of_rows is not None else None, summed.total(), None
