"""Products that compute on one chunk of rows while the next one travels, in the layouts of `strategies`' rule for them.

A rank has some rows of the input and some columns of the weight: it gathers the rows of all ranks. Or it has some
features of all rows, and the rows of the weight that go with them: it reduces all rows of the result, and has its own.
The backward of either has the collective of the other. Gathered rows are saved for the weight's gradient, or (`again`)
gathered once more for it, whole. With `whole` the forward gathers them whole, too.

Where a group of GPUs has symmetric memory, kernels of torch do this rank by rank (`fused`): `_way` decides.

Legend: M rows of one rank, n·M of all, K features, O columns; dims before the rows are left out.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, autograd
from torch.nn import functional as F

from autopar.ir.program.operators.derivatives import is_requested, once_differentiable
from autopar.runtime.collectives.in_chunks import Chunks, arrived, start_gather, start_reduce_scatter
from autopar.runtime.collectives.mesh_axes import IN_ORDER, Axes, Axis, axes_of
from autopar.runtime.implementations.products.fused import gather_and_multiply, is_fused, multiply_and_scatter
from autopar.strategies.rules.products.chunked import COLUMN, ROW, chunks_of


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    again: int = 0,
    whole: int = 0,
) -> Tensor:
    """Compute `aten.linear.default` in chunks.

    Moves, of n ranks, the input's or the output's whole rows, and again backward. With `again` gathered rows are not
    saved for the backward, which moves them once more.
    """
    return _product(x, weight, bias, f"...{x.ndim - 2}", axes, zigzag, again, whole)


def linears(
    x: Tensor,
    *operands: Tensor | None,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    again: int = 0,
    whole: int = 0,
) -> tuple[Tensor, ...]:
    """Compute `linear` of one input with several weights, each followed by its bias or None, in one gather."""
    return _of_gathered(x, f"...{x.ndim - 2}", axes, zigzag, again, whole, operands)


def matmul(
    x: Tensor,
    other: Tensor,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    again: int = 0,
    whole: int = 0,
) -> Tensor:
    """Compute `aten.matmul.default` with a matrix, in chunks.

    Moves as much as `linear`.
    """
    return _product(x, other.mT, None, "m", axes, zigzag, again, whole)


mm = matmul


def matmuls(
    x: Tensor,
    *others: Tensor,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    again: int = 0,
    whole: int = 0,
) -> tuple[Tensor, ...]:
    """Compute `matmul` of one input with several matrices, in one gather."""
    return _of_gathered(x, "m", axes, zigzag, again, whole, [each for other in others for each in (other.mT, None)])


SHARED: Mapping[Any, tuple[Any, int]] = {linear: (linears, 2), matmul: (matmuls, 1)}
"""Product of one weight → product of several, which gathers their input once, and its operands for each."""


@dataclass(frozen=True, slots=True)
class _Way:
    """The axis over which rows travel, to be gathered or reduced, and in which chunks, or in one kernel."""

    axis: Axis
    chunks: Chunks
    gathers: bool
    fused: bool

    @property
    def whole(self) -> _Way:
        """The same rows in one chunk, and in no kernel with a product."""
        return replace(self, chunks=self.chunks.in_one(), fused=False)


def _way(x: Tensor, w_OK: Tensor | None, rows: str, axes: Axes, zigzag: Axes) -> _Way:
    """Return how rows travel."""
    assert w_OK is not None, "a product without a weight"
    shared = {factor: [name for name in axes[rows] if name in axes.get(factor, ())] for factor in (COLUMN, ROW)}
    gathers = bool(shared[COLUMN])
    (axis,) = axes_of(shared[COLUMN if gathers else ROW])
    dim = x.ndim - 2
    leading = [*x.shape[:dim], x.shape[dim] if gathers else x.shape[dim] // axis.size]
    features = w_OK.shape[1 if gathers else 0]
    along, sizes = chunks_of(leading, math.prod(leading) * features * x.itemsize * axis.size)
    chunks = Chunks(dim, along, sizes, axis.size, axis.name in zigzag.get(rows, ()))
    return _Way(axis, chunks, gathers, is_fused(x, axis, chunks.zigzag))


def _of_gathered(
    x: Tensor, rows: str, axes: Axes, zigzag: Axes, again: int, whole: int, operands: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Return the rows of all ranks by several weights, each followed by its bias or None."""
    way = _way(x, operands[0], rows, axes, zigzag)
    return (_OfGatheredAgain if again else _OfGathered).apply(x, way.whole if whole else way, *operands)


def _product(
    x: Tensor, w_OK: Tensor, bias: Tensor | None, rows: str, axes: Axes, zigzag: Axes, again: int, whole: int
) -> Tensor:
    way = _way(x, w_OK, rows, axes, zigzag)
    if way.gathers:
        (out,) = _of_gathered(x, rows, axes, zigzag, again, whole, (w_OK, bias))
        return out
    out = _ThenReduced.apply(x, w_OK, way)
    return out if bias is None else out + bias


def _gathered(part: Tensor, way: _Way) -> Iterator[Tensor]:
    """Yield the chunks of all ranks, in the order of `Chunks.of_whole`, while later ones are in flight."""
    travelling = [start_gather(chunk, way.axis) for chunk in way.chunks.of_part(part)]
    while travelling:
        yield way.chunks.of_ranks(arrived(travelling.pop(0)))


class _Reduced:
    """Chunks of products on their way to the ranks that have their rows, two at a time."""

    def __init__(self, way: _Way) -> None:
        self._way = way
        self._travelling: list[Tensor] = []
        self._parts: list[Tensor] = []

    def add(self, product: Tensor) -> None:
        """Add the next chunk, in the order of `Chunks.of_whole`."""
        self._travelling.append(start_reduce_scatter(self._way.chunks.by_rank(product), self._way.axis))
        if len(self._travelling) > 1:
            self._parts.append(arrived(self._travelling.pop(0)).squeeze(0))

    def arrived(self) -> Tensor:
        """Return this rank's rows of the sum."""
        self._parts += [arrived(each).squeeze(0) for each in self._travelling]
        return self._way.chunks.joined(self._parts)


def _products_of_gathered(
    part: Tensor, way: _Way, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the rows of all ranks, where they are to be saved, and their product by each weight [O, K], with its
    bias.
    """
    whole, products = way.chunks.whole(), [way.chunks.whole() for _ in weights]
    for chunk in _gathered(part, way):
        for product, w_OK, bias in zip(products, weights, biases, strict=True):
            product.add(F.linear(chunk, w_OK, bias))
        if keep:
            whole.add(chunk)
    return whole.made() if keep else None, [product.made() for product in products]


def _fused_products_of_gathered(
    part: Tensor, way: _Way, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the same in one kernel."""
    matrices = [w_OK.mT for w_OK in weights]
    whole, products = gather_and_multiply(part, matrices, way.axis, way.chunks.dim, keep)
    pairs = zip(products, biases, strict=True)
    return whole, [product if bias is None else product.add_(bias) for product, bias in pairs]


def _products(
    x: Tensor, way: _Way, operands: Sequence[Tensor | None], keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the rows of all ranks, if they are to be saved, and their product by each weight, each followed by its
    bias.
    """
    products_of = _fused_products_of_gathered if way.fused else _products_of_gathered
    return products_of(x, way, operands[::2], operands[1::2], keep)  # type: ignore[arg-type]


def _sum_of_products(parts: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """Return the sum of parts [..., O], each by its matrix [O, K], in one buffer."""
    total = parts[0] @ matrices[0]
    for part, matrix in zip(parts[1:], matrices[1:], strict=True):
        total.view(-1, total.shape[-1]).addmm_(part.flatten(0, -2), matrix)
    return total


def _reduced_sum(parts: Sequence[Tensor], matrices: Sequence[Tensor], way: _Way) -> Tensor:
    """Return this rank's rows of the sum over ranks of all parts [n·M, O], each by its matrix [O, K]."""
    reduced = _Reduced(way)
    for chunks in zip(*map(way.chunks.of_whole, parts), strict=True):
        reduced.add(_sum_of_products(chunks, matrices))
    return reduced.arrived()


def _fused_reduced_sum(parts: Sequence[Tensor], matrices: Sequence[Tensor], way: _Way) -> Tensor:
    """Return the same in one kernel, which takes one part: several are one of all their features."""
    part, matrix = (
        (parts[0], matrices[0]) if len(parts) == 1 else (torch.cat(list(parts), -1), torch.cat(list(matrices)))
    )
    return multiply_and_scatter(part, matrix, way.axis, way.chunks.dim)


def _is_requested(ctx: Any) -> list[bool]:
    """Return for each argument of a Function whether the running backward must give its gradient."""
    return [needed and is_requested(ctx, sum(ctx.are_tensors[:at])) for at, needed in enumerate(ctx.needs_input_grad)]


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient [O, K] from rows [..., O] and [..., K]."""
    return grad.flatten(0, -2).mT @ x.flatten(0, -2)


class _OfGathered(autograd.Function):
    """x [M, K] of this rank; weights [O, K], each with a bias [O] or None, of its columns → [n·M, O] of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way, *operands: Tensor | None) -> tuple[Tensor, ...]:
        of_x, _, *of_operands = ctx.needs_input_grad
        weights = operands[::2]
        whole, products = _products(x, way, operands, any(of_operands[::2]))
        ctx.save_for_backward(whole, *(weights if of_x else ()))
        ctx.way, ctx.are_tensors = way, [True, False, *(each is not None for each in operands)]
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole, *weights = ctx.saved_tensors
        of_x, _, *of_operands = _is_requested(ctx)
        reduce = _reduced_sum if not ctx.way.fused else _fused_reduced_sum
        of_rows = reduce(grads, weights, ctx.way) if of_x else None
        found: list[Tensor | None] = []
        for grad, of_weight, of_bias in zip(grads, of_operands[::2], of_operands[1::2], strict=True):
            found.append(_weight_gradient(grad, whole) if of_weight else None)
            found.append(grad.flatten(0, -2).sum(0) if of_bias else None)
        return of_rows, None, *found


class _OfGatheredAgain(autograd.Function):
    """`_OfGathered` that saves x, and gathers it once more while it computes x's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way, *operands: Tensor | None) -> tuple[Tensor, ...]:
        of_x, _, *of_operands = ctx.needs_input_grad
        _, products = _products(x, way, operands, keep=False)
        ctx.save_for_backward(x if any(of_operands[::2]) else None, *(operands[::2] if of_x else ()))
        ctx.way, ctx.are_tensors = way.whole, [True, False, *(each is not None for each in operands)]
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, *weights), way = ctx.saved_tensors, ctx.way
        of_x, _, *of_operands = _is_requested(ctx)
        gathering = start_gather(x, way.axis) if any(of_operands[::2]) else None
        reducing = None
        if of_x:
            of_rows = _sum_of_products(grads, weights)
            reducing = start_reduce_scatter(way.chunks.by_rank(of_rows), way.axis)
            del of_rows
        whole = None if gathering is None else way.chunks.of_ranks(arrived(gathering))
        del gathering
        found: list[Tensor | None] = []
        for grad, of_weight, of_bias in zip(grads, of_operands[::2], of_operands[1::2], strict=True):
            found.append(_weight_gradient(grad, whole) if of_weight and whole is not None else None)
            found.append(grad.flatten(0, -2).sum(0) if of_bias else None)
        return None if reducing is None else arrived(reducing).squeeze(0), None, *found


class _ThenReduced(autograd.Function):
    """x [n·M, K] and weight [O, K], of this rank's features → [M, O] of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_OK: Tensor, way: _Way) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        reduce = _reduced_sum if not way.fused else _fused_reduced_sum
        ctx.save_for_backward(x if of_weight else None, w_OK if of_x else None)
        ctx.way, ctx.are_tensors = way, [True, True, False]
        return reduce([x], [w_OK.mT], way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w_OK = ctx.saved_tensors
        of_x, of_weight, _ = _is_requested(ctx)
        products_of = _products_of_gathered if not ctx.way.fused else _fused_products_of_gathered
        whole, of_rows = products_of(grad, ctx.way, [w_OK.mT] if of_x else [], [None] if of_x else [], of_weight)
        of_weights = None if whole is None else _weight_gradient(whole, x)
        return of_rows[0] if of_x else None, of_weights, None
