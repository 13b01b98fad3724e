"""The moves between layouts as functions of a local tensor: what a rewritten graph calls.

    function                    move      forward          backward
    all_reduce                  P → I     all-reduce       -
    all_reduce_gradient         I → R     -                all-reduce
    all_gather                  S → R     all-gather       reduce-scatter
    all_gather_invariant        S → I     all-gather       slice
    reduce_scatter              P → S     reduce-scatter   all-gather
    split                       I → S     slice            all-gather
    split_replicated            R → S     slice            scatter into zeros
    scatter                     S → P     zeros around     slice
    all_to_all                  S → S     all-to-all       all-to-all
    keep_on_first               I → P     zeros elsewhere  -
    keep_on_first_both          R → P     zeros elsewhere  zeros elsewhere
    replicated_to_invariant     R → I     -                zeros elsewhere

Axes have names, and `use_mesh` gives their process groups, so that one graph serves every rank. A dim that does not
divide is padded with zeros to equal parts; functions that gather take the dim's true size and cut the padding off.
Functions of a split dim take `zigzag` for Z(dim) in place of S(dim). Messages are views if the parts of ranks lie one
after the other in memory (`ir.sharding.rearranged`), else one copy. Each function is an `autograd.Function` over
`torch.ops._c10d_functional`; its backward uses what its forward resolved.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._local_tensor import local_tensor_mode

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.direct import applied, below_autograd
from autopar.runtime.collectives.mesh_axes import OPEN_RECORDS, Axis, axis_of, count
from autopar.runtime.collectives.rank_parts import by_rank, whole_of

_c10d = torch.ops._c10d_functional


def raw_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Return the sum (or "max") over the axis, without a gradient."""
    return x if axis.size == 1 else waited_for(all_reduce_in_flight(x, axis, op))


def all_reduce_in_flight(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Return the same on its way; `waited_for` says when it is there."""
    if OPEN_RECORDS:
        count("all_reduce", axis, x.numel() * x.itemsize)
    return below_autograd(_c10d.all_reduce.default, x.contiguous(), op, axis.group)


def raw_sum(x: Tensor, axes: Iterable[Axis]) -> Tensor:
    """Return the sum of all ranks' tensors over some axes, one after the other."""
    for axis in axes:
        x = raw_all_reduce(x, axis)
    return x


def raw_all_gather(x: Tensor, axis: Axis, dim: int, size: int, zigzag: bool = False) -> Tensor:
    """Return the whole of `dim` of the parts of all ranks, cut to `size`."""
    if axis.size == 1:
        return x
    return _joined(_gather_in_flight(x, axis), dim, size, zigzag)


def _gather_in_flight(x: Tensor, axis: Axis) -> Tensor:
    count("all_gather", axis, x.numel() * x.itemsize * axis.size)
    return rows_in_flight(x.contiguous().unsqueeze(0), axis)


def _joined(buffer: Tensor, dim: int, size: int, zigzag: bool) -> Tensor:
    """Wait for the parts of all ranks, and return the whole of `dim`, cut to `size`."""
    return _cut(whole_of(waited_for(buffer), dim, zigzag), dim, size)


@dataclass(slots=True, eq=False)
class Travelling:
    """A gathered tensor, without a graph, that is on its way until `arrived` has waited for it."""

    _buffer: Tensor
    _join: Callable[[Tensor], Tensor] | None
    _requires_grad: bool

    @classmethod
    def gathered(cls, x: Tensor, axis: str, dim: int, size: int, zigzag: bool = False) -> Travelling:
        """Begin what `all_gather` does with these arguments."""
        over = axis_of(axis)
        if over.size == 1:
            return cls(x.detach(), None, x.requires_grad)
        buffer = _gather_in_flight(x.detach(), over)
        return cls(buffer, lambda buffer: _joined(buffer, dim, size, zigzag), x.requires_grad)

    def arrived(self) -> Tensor:
        """Return the whole, once it is there."""
        if self._join is not None:
            self._buffer, self._join = self._join(self._buffer), None
        return self._buffer.requires_grad_(self._requires_grad)

    def __del__(self) -> None:
        if getattr(self, "_join", None) is not None:  # a collective holds its buffers until it is waited for
            waited_for(self._buffer)


def rows_in_flight(x: Tensor, axis: Axis, group: str = "") -> Tensor:
    """Return the contiguous parts of all ranks one after the other in one buffer; `waited_for` says when they are
    there.

    They travel in another group of the same ranks where one is given.
    """
    group = group or axis.group
    if not x.is_cpu or x.is_complex() or torch.compiler.is_compiling() or local_tensor_mode() is not None:
        return below_autograd(_c10d.all_gather_into_tensor.default, x, axis.size, group)
    # Gloo's threads (torch 2.13, `ProcessGroupGloo::runLoop`) write the name of what they have done into one
    # std::string, without a lock. The names of the other collectives, and of this form of an all-gather, have no more
    # than 15 characters, which lie inside the string; "ALLGATHER_COALESCED" lies on the heap and may be freed twice.
    whole = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return below_autograd(_c10d.all_gather_into_tensor_out.default, x, axis.size, group, out=whole)


def waited_for(buffer: Tensor) -> Tensor:
    """Return the result of a collective, once it is there."""
    return below_autograd(_c10d.wait_tensor.default, buffer)


def raw_reduce_scatter(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """Return this rank's part of the sum, split along `dim`."""
    if axis.size == 1:
        return x
    x = padded(x, dim, axis.size)
    count("reduce_scatter", axis, x.numel() * x.itemsize)
    message = by_rank(x, dim, axis.size, zigzag).contiguous()
    mine = below_autograd(_c10d.reduce_scatter_tensor.default, message, "sum", axis.size, axis.group)
    return waited_for(mine).squeeze(0)


def raw_all_to_all(
    x: Tensor, axis: Axis, source_dim: int, target_dim: int, size: int, zigzag: tuple[bool, bool] = (False, False)
) -> Tensor:
    """Move a split from `source_dim` to `target_dim` by all-to-all; `size` is the whole size of `source_dim`.

    `zigzag` tells of both dims whether they are zigzag-sharded.
    """
    if axis.size == 1:
        return x
    if x.is_complex():  # gloo has no complex all-to-all: send pairs of real numbers, in a last dim
        pairs = torch.view_as_real(x.resolve_conj())
        return torch.view_as_complex(raw_all_to_all(pairs, axis, source_dim, target_dim, size, zigzag).contiguous())
    x = padded(x, target_dim, axis.size)
    count("all_to_all", axis, x.numel() * x.itemsize)
    message, counts = by_rank(x, target_dim, axis.size, zigzag[1]).contiguous(), [1] * axis.size
    got = waited_for(below_autograd(_c10d.all_to_all_single.default, message, counts, counts, axis.group))
    return _cut(whole_of(got, source_dim, zigzag[0]), source_dim, size)


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    return x.narrow(dim, 0, size) if x.shape[dim] != size else x


def local_slice(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Tensor:
    """Return this rank's part of a tensor that is equal everywhere, without communication."""
    if axis.size == 1:
        return x
    x = padded(x, dim, axis.size) if x.shape[dim] % axis.size else x
    part = x.shape[dim] // axis.size
    if zigzag:
        half = part // 2
        last = x.shape[dim] - (axis.rank + 1) * half
        return torch.cat([x.narrow(dim, axis.rank * half, half), x.narrow(dim, last, half)], dim)
    return x.narrow(dim, axis.rank * part, part).contiguous()


def scatter_into_zeros(x: Tensor, axis: Axis, dim: int, size: int, zigzag: bool = False) -> Tensor:
    """Return this rank's part in its place among zeros."""
    if axis.size == 1:
        return x
    if is_eager() and not zigzag:
        shape = list(x.shape)
        shape[dim] = size
        start = min(axis.rank * x.shape[dim], size)
        mine = x.narrow(dim, 0, max(0, min(x.shape[dim], size - start)))
        whole = x.new_zeros(shape)
        whole.narrow(dim, start, mine.shape[dim]).copy_(mine)
        return whole
    mine = (torch.arange(axis.size, device=x.device) == axis.rank).reshape([-1, *[1] * x.ndim])
    parts = torch.where(mine, x.unsqueeze(0), torch.zeros((), dtype=x.dtype, device=x.device))
    whole = whole_of(parts, dim, zigzag)
    return whole if zigzag else whole.narrow(dim, 0, size)


def on_first(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensor on the axis's first rank, zeros on the others."""
    if axis.size == 1:
        return x
    if is_eager():
        return x if axis.rank == 0 else torch.zeros_like(x)
    first = torch.zeros((), dtype=torch.int64, device=x.device) + axis.rank == 0
    return torch.where(first, x, torch.zeros((), dtype=x.dtype, device=x.device))


def is_eager() -> bool:
    """Return whether operations run as they are, on one rank: neither torch.compile nor simulated ranks take them."""
    return not torch.compiler.is_compiling() and local_tensor_mode() is None


def padded(x: Tensor, dim: int, num_parts: int) -> Tensor:
    """Return the tensor with zeros at the end of `dim`, so that it divides."""
    missing = -x.shape[dim] % num_parts
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.set_materialize_grads(False)
        return raw_all_reduce(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return raw_all_reduce(grad, ctx.axis), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, size: int, invariant: bool, zigzag: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.dim, ctx.invariant, ctx.zigzag = axis, dim, invariant, zigzag
        return raw_all_gather(x, axis, dim, size, zigzag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = local_slice if ctx.invariant else raw_reduce_scatter
        return back(grad, ctx.axis, ctx.dim, ctx.zigzag), None, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, zigzag: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.dim, ctx.size, ctx.zigzag = axis, dim, x.shape[dim], zigzag
        return raw_reduce_scatter(x, axis, dim, zigzag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return raw_all_gather(grad, ctx.axis, ctx.dim, ctx.size, ctx.zigzag), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, replicated: bool, zigzag: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.dim, ctx.size, ctx.replicated, ctx.zigzag = axis, dim, x.shape[dim], replicated, zigzag
        return local_slice(x, axis, dim, zigzag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = scatter_into_zeros if ctx.replicated else raw_all_gather
        return back(grad, ctx.axis, ctx.dim, ctx.size, ctx.zigzag), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, size: int, zigzag: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.dim, ctx.zigzag = axis, dim, zigzag
        return scatter_into_zeros(x, axis, dim, size, zigzag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return local_slice(grad, ctx.axis, ctx.dim, ctx.zigzag), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, source_dim: int, target_dim: int, size: int, zigzag: tuple[bool, bool]
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.dims, ctx.size, ctx.zigzag = axis, (source_dim, target_dim), x.shape[target_dim], zigzag
        return raw_all_to_all(x, axis, source_dim, target_dim, size, zigzag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (source_dim, target_dim), (source, target) = ctx.dims, ctx.zigzag
        back = raw_all_to_all(grad, ctx.axis, target_dim, source_dim, ctx.size, (target, source))
        return back, None, None, None, None, None


class _OnFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: bool, backward: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.masked = axis, backward
        return on_first(x, axis) if forward else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return on_first(grad, ctx.axis) if ctx.masked else grad, None, None, None


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """P → I: the sum over `axis`; its gradient passes as it is. Moves the tensor's bytes."""
    return applied(_AllReduce, x, axis_of(axis))


def all_reduce_gradient(x: Tensor, axis: str) -> Tensor:
    """I → R: the tensor itself; its gradient is summed over `axis` (Megatron's f). Moves its bytes backward."""
    return applied(_AllReduceGradient, x, axis_of(axis))


def all_gather(x: Tensor, axis: str, dim: int, size: int, zigzag: bool = False) -> Tensor:
    """S(dim) → R: the whole of `dim`, `size` long; the gradient is reduce-scattered. Moves the whole's bytes twice."""
    return applied(_AllGather, x, axis_of(axis), dim, size, False, zigzag)


def all_gather_invariant(x: Tensor, axis: str, dim: int, size: int, zigzag: bool = False) -> Tensor:
    """S(dim) → I: the whole of `dim`, `size` long; the gradient is sliced. Moves the whole's bytes."""
    return applied(_AllGather, x, axis_of(axis), dim, size, True, zigzag)


def reduce_scatter(x: Tensor, axis: str, dim: int, zigzag: bool = False) -> Tensor:
    """P → S(dim): this rank's part of the sum; the gradient is gathered. Moves the whole's bytes twice."""
    return applied(_ReduceScatter, x, axis_of(axis), dim, zigzag)


def split(x: Tensor, axis: str, dim: int, zigzag: bool = False) -> Tensor:
    """I → S(dim): this rank's part; the gradient is gathered. Moves the whole's bytes backward."""
    return applied(_Split, x, axis_of(axis), dim, False, zigzag)


def split_replicated(x: Tensor, axis: str, dim: int, zigzag: bool = False) -> Tensor:
    """R → S(dim): this rank's part; the gradient stands in its place among zeros. Moves nothing."""
    return applied(_Split, x, axis_of(axis), dim, True, zigzag)


def scatter(x: Tensor, axis: str, dim: int, size: int, zigzag: bool = False) -> Tensor:
    """S(dim) → P: this rank's part in its place among zeros, `size` long; the gradient is sliced. Moves nothing."""
    return applied(_Scatter, x, axis_of(axis), dim, size, zigzag)


def all_to_all(
    x: Tensor,
    axis: str,
    source_dim: int,
    target_dim: int,
    size: int,
    zigzag: bool = False,
    target_zigzag: bool = False,
) -> Tensor:
    """S(source_dim) → S(target_dim); `size` is the whole of `source_dim`. Moves the part's bytes twice."""
    return applied(_AllToAll, x, axis_of(axis), source_dim, target_dim, size, (zigzag, target_zigzag))


def keep_on_first(x: Tensor, axis: str) -> Tensor:
    """I → P: the value on the first rank, zeros elsewhere; the gradient passes as it is. Moves nothing."""
    return applied(_OnFirst, x, axis_of(axis), True, False)


def keep_on_first_both(x: Tensor, axis: str) -> Tensor:
    """R → P: value and gradient on the first rank, zeros elsewhere. Moves nothing."""
    return applied(_OnFirst, x, axis_of(axis), True, True)


def replicated_to_invariant(x: Tensor, axis: str) -> Tensor:
    """R → I: the value as it is; the gradient on the first rank, zeros elsewhere. Moves nothing."""
    return applied(_OnFirst, x, axis_of(axis), False, True)


GATHERS = frozenset((all_gather, all_gather_invariant))
"""The moves that gather in their forward."""
COMMUNICATING = frozenset((all_reduce, all_gather, all_gather_invariant, reduce_scatter, all_to_all))
"""The moves that communicate in their forward."""
