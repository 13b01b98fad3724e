"""Uneven all-to-alls of rows: waited for at once, or when the rows are first used.

    exchanged    rows from all ranks; backward their gradients, back
    leaving      the same, on their way until `arrived`

Other calls run between the last two, in the backward too: autograd runs what came last in the forward first, so the
backward of `arrived` begins the exchange of the gradients, and that of `leaving` waits for it.

Code that torch.compile generates may use the memory of rows on their way: who lets rows leave is out of its sight.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.derivatives import called_directly, once_differentiable
from autopar.runtime.collectives.direct import applied, below_autograd
from autopar.runtime.collectives.layout_moves import waited_for
from autopar.runtime.collectives.mesh_axes import OPEN_RECORDS, Axis, count

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Way:
    """Numbers of rows that go to each rank of an axis and come from it; counted as `num_bytes`. Gradients go back."""

    sent: Sequence[Any]
    got: Sequence[Any]
    axis: Axis
    num_bytes: int

    def begin(self, x: Tensor, back: bool = False) -> Tensor:
        """Return the rows from all ranks, on their way (`back`)."""
        if OPEN_RECORDS:
            count("all_to_all", self.axis, self.num_bytes)
        got, sent = list(self.got), list(self.sent)
        sizes = (sent, got) if back else (got, sent)
        return below_autograd(_c10d.all_to_all_single.default, x.contiguous(), *sizes, self.axis.group)

    def take(self, x: Tensor, back: bool = False) -> Tensor:
        """Return the rows from all ranks, without a gradient; with `back` those that go the other way."""
        return waited_for(self.begin(x, back))


@dataclass(slots=True, eq=False)
class Travelling:
    """Rows on their way.

    The graph of rows refers to their gradients alone, so that rows that nobody takes are freed at once.
    """

    way: Way
    rows: Tensor | None = None
    gradients: Travelling | None = None
    """Gradients of the rows, which are on their way in the backward."""

    def __del__(self) -> None:
        # Nobody waited, e.g. because a call failed: a collective holds its buffers until it is waited for.
        if (rows := getattr(self, "rows", None)) is not None:
            waited_for(rows)

    def taken(self) -> Tensor | None:
        """Return the rows to one who waits for them."""
        rows, self.rows = self.rows, None
        return rows


def exchanged(x: Tensor, way: Way) -> Tensor:
    """Return the rows from all ranks."""
    return applied(_Exchange, x, way)


def leaving(x: Tensor, way: Way) -> Travelling:
    """Begin `exchanged`; `arrived` returns the rows."""
    gradients = Travelling(way)
    return Travelling(way, applied(_Leave, x, way, gradients), gradients)


def arrived(rows: Travelling | Tensor) -> Tensor:
    """Return rows that were on their way, once they are there; to be called once."""
    if isinstance(rows, Tensor):
        return rows
    return applied(_Arrive, rows.taken(), rows.gradients)


@called_directly
class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.way = way
        return way.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.way.take(grad, back=True), None


@called_directly
class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way, gradients: Travelling) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.gradients = way, gradients
        return way.begin(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        coming = ctx.gradients.taken()
        return ctx.way.take(grad, back=True) if coming is None else waited_for(coming), None, None


@called_directly
class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gradients: Travelling) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return waited_for(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.gradients.rows = ctx.gradients.way.begin(grad, back=True)
        return grad, None  # `_Leave` takes those that are on their way
