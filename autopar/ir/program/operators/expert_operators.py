"""Mixture-of-Experts as four operators: rows of tokens go to their experts, through grouped products, and home again.

    dispatch(x, index, num_experts, dropping, padded) -> rows, counts, ids, route, splits
    grouped_mm(rows, weight, counts) -> rows
    of_expert(values, ids, counts) -> rows
    combine(rows, weights, route, counts, splits, dropping, padded) -> y

Rows are the tokens once per expert that they have been sent to, in the order of experts and, for one expert, of tokens:
of ragged parts that follow from the data. Ordinary operations on rows lie between the ends. Legend:

    T tokens (any number of leading dims)   D features   K experts of a token   E experts   R = T · K rows

Dropless (MegaBlocks, Gale et al. 2022), unless they are `dropping`: slots whose expert is E have no row then, -1 in
route, and add nothing to their token. On ranks, rows that are `padded` lie among others that go nowhere, so that no
size depends on the data; one process pads nothing. `capture.experts` finds the place of these operators in a model's
graph, `runtime.implementations.experts` runs them on ranks.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from autopar.ir.program.operators.derivatives import called_directly, once_differentiable

OTHER_GROUPED_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""The names of the grouped products that models call; that of transformers need not be there."""
FAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes for which PyTorch has a grouped product."""
ROW_BYTES = 16
"""Number of bytes of which each row of a matrix must be a multiple for PyTorch's grouped product."""


def sorted_slots(expert_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expert of every row, and which of all T · K slots it fills."""
    ids_R, slots_R = torch.sort(expert_TK.reshape(-1), stable=True)
    return ids_R, slots_R


def count_rows(expert_TK: Tensor, num_experts: int) -> Tensor:
    """Return the rows of each expert."""
    flat = expert_TK.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))


def inverted(slots_R: Tensor) -> Tensor:
    """Return the row of every slot, given the slot of every row."""
    return torch.empty_like(slots_R).scatter_(0, slots_R, torch.arange(slots_R.numel(), device=slots_R.device))


class Take(torch.autograd.Function):
    """Rows of tokens (T, D), where every slot of `route` (T, K) has one."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slots_R: Tensor, route_TK: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(route_TK)
        return x_TD[slots_R // route_TK.shape[-1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        (route_TK,) = ctx.saved_tensors
        return grad_RD[route_TK].sum(-2), None, None


class Home(torch.autograd.Function):
    """Tokens (T, D) as sums of their rows, each by its weight (T, K), where every slot of `route` (T, K) has one."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor | None, route_TK: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = rows_RD.dtype
        ctx.save_for_backward(None if weights_TK is None else rows_RD, weights_TK, route_TK)
        rows_TKD = rows_RD[route_TK]
        return (rows_TKD if weights_TK is None else rows_TKD * weights_TK.unsqueeze(-1)).sum(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        rows_RD, weights_TK, route_TK = ctx.saved_tensors
        grad_T1D = grad_TD.unsqueeze(-2)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            of_slots = grad_T1D if weights_TK is None else grad_T1D * weights_TK.unsqueeze(-1)
            of_slots = of_slots.expand(*route_TK.shape, -1).to(ctx.dtype).flatten(0, -2)
            grad_rows = torch.empty_like(of_slots).index_copy_(0, route_TK.flatten(), of_slots)
        if weights_TK is not None and ctx.needs_input_grad[1]:
            grad_weights = (rows_RD[route_TK] * grad_T1D).sum(-1).to(weights_TK.dtype)
        return grad_rows, grad_weights, None


class Gather(torch.autograd.Function):
    """Rows of some tokens (T, D)."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token_R)
        ctx.num_tokens = x_TD.shape[0]
        return x_TD[token_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        (token_R,) = ctx.saved_tensors
        return grad_RD.new_zeros(ctx.num_tokens, grad_RD.shape[-1]).index_add_(0, token_R, grad_RD), None


class PartHome(torch.autograd.Function):
    """Sum of rows to tokens, as `Home`, in which slots without a row (-1 in `route`) count as zero."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor | None, route_TK: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        slot_R = _slots_of(route_TK, rows_RD.shape[0])
        ctx.dtype, ctx.top_k = rows_RD.dtype, route_TK.shape[-1]
        ctx.save_for_backward(None if weights_TK is None else rows_RD, weights_TK, slot_R)
        weighted_RD = rows_RD if weights_TK is None else rows_RD * weights_TK.flatten()[slot_R].unsqueeze(-1)
        zeros_TD = weighted_RD.new_zeros(route_TK.shape[0], rows_RD.shape[-1])
        return zeros_TD.index_add_(0, slot_R // route_TK.shape[-1], weighted_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        rows_RD, weights_TK, slot_R = ctx.saved_tensors
        grad_RD = grad_TD[slot_R // ctx.top_k]
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = grad_RD if weights_TK is None else grad_RD * weights_TK.flatten()[slot_R].unsqueeze(-1)
            grad_rows = grad_rows.to(ctx.dtype)
        if weights_TK is not None and ctx.needs_input_grad[1]:
            of_rows = (rows_RD * grad_RD).sum(-1).to(weights_TK.dtype)
            grad_weights = weights_TK.new_zeros(weights_TK.numel()).index_copy_(0, slot_R, of_rows)
            grad_weights = grad_weights.view(weights_TK.shape)
        return grad_rows, grad_weights, None


class PaddedTake(torch.autograd.Function):
    """Rows of the tokens (T, D) of some slots, of which `route` (T, K) has the row; -1 for a slot without one."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slots_R: Tensor, route_TK: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(route_TK)
        return x_TD[slots_R // route_TK.shape[-1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        (route_TK,) = ctx.saved_tensors
        return _rows_of_slots(grad_RD, route_TK).sum(-2), None, None


class PaddedHome(torch.autograd.Function):
    """Sum of rows to tokens, as `Home`, of rows of which some belong to no slot; -1 in `route` counts as zero."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor | None, route_TK: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.num_rows = rows_RD.dtype, rows_RD.shape[0]
        ctx.save_for_backward(None if weights_TK is None else rows_RD, weights_TK, route_TK)
        rows_TKD = _rows_of_slots(rows_RD, route_TK)
        return (rows_TKD if weights_TK is None else rows_TKD * weights_TK.unsqueeze(-1)).sum(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        rows_RD, weights_TK, route_TK = ctx.saved_tensors
        grad_T1D = grad_TD.unsqueeze(-2)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            of_slots = grad_T1D if weights_TK is None else grad_T1D * weights_TK.unsqueeze(-1)
            of_slots = of_slots.expand(*route_TK.shape, -1).to(ctx.dtype).flatten(0, -2)
            places = torch.where(route_TK < 0, ctx.num_rows, route_TK).flatten()  # the last row is left out
            grad_rows = of_slots.new_zeros(ctx.num_rows + 1, of_slots.shape[-1]).index_copy_(0, places, of_slots)[:-1]
        if weights_TK is not None and ctx.needs_input_grad[1]:
            grad_weights = (_rows_of_slots(rows_RD, route_TK) * grad_T1D).sum(-1).to(weights_TK.dtype)
        return grad_rows, grad_weights, None


def _rows_of_slots(rows_RD: Tensor, route_TK: Tensor) -> Tensor:
    """Return the row of every slot, zeros for one without: (T, K, D)."""
    return torch.where(route_TK.unsqueeze(-1) < 0, 0, rows_RD[route_TK.clamp(min=0)])


def _slots_of(route_TK: Tensor, num_rows: Any) -> Tensor:
    slots = torch.argsort(route_TK.flatten())
    return slots[slots.shape[0] - num_rows :]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


def all_rows(x: Tensor, index: Tensor, apply: Callable[..., Any] = _apply) -> tuple[Tensor, Tensor, Tensor]:
    """Return a row for every slot: rows, the expert of each, and the row of every slot.

    `apply` is how functions of autograd are called.
    """
    ids, slots = sorted_slots(index)
    route = inverted(slots).view(index.shape)
    return apply(Take, x.reshape(-1, x.shape[-1]), slots, route.flatten(0, -2)), ids, route


def some_rows(x: Tensor, index: Tensor, num_experts: int, kept: Tensor, num_rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `all_rows` returns, but with rows for the `num_rows` slots marked in `kept` alone.

    Other slots have -1 in the last result.
    """
    ids, slots = sorted_slots(torch.where(kept, index, num_experts))
    ids, slots = ids[:num_rows], slots[:num_rows]
    places = torch.arange(slots.shape[0], device=slots.device)
    route = (
        torch.full_like(index, -1, memory_format=torch.contiguous_format)
        .view(-1)
        .scatter_(0, slots, places)
        .view(index.shape)
    )
    return Gather.apply(x.reshape(-1, x.shape[-1]), slots // index.shape[-1]), ids, route


def _dispatch(
    x: Tensor, index: Tensor, num_experts: int, dropping: bool = False, padded: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if dropping:
        kept = index < num_experts
        # Without values, as while a model is captured, rows are counted as if none were dropped.
        num_rows = index.numel() if is_fake(index) or index.is_meta else kept.sum().item()
        rows, ids, route = some_rows(x, index, num_experts, kept, num_rows)
    else:
        rows, ids, route = all_rows(x, index)
    return rows, count_rows(ids, num_experts), ids, route, torch.zeros(2, dtype=torch.int64)


def _of_expert(values: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return values[ids]


def _combine(
    rows: Tensor,
    weights: Tensor | None,
    route: Tensor,
    counts: Tensor,
    splits: Tensor,
    dropping: bool = False,
    padded: float | None = None,
) -> Tensor:
    home = PartHome if dropping else Home
    y = home.apply(rows, None if weights is None else weights.flatten(0, -2), route.flatten(0, -2))
    return y.view(*route.shape[:-1], rows.shape[-1])


def _grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows (R, K) by their expert's matrix (E, K, N), the first counts[0] rows by the first one and so on."""
    if _is_fast(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        found = torch.ops.aten._grouped_mm(_aligned(rows, 1), _aligned(weight, 2), ends)
        return found[:, : weight.shape[-1]].contiguous()
    found = rows.new_empty(rows.shape[0], weight.shape[-1])
    torch.cat([part @ each for part, each in zip(rows.split(counts.tolist()), weight, strict=True)], out=found)
    return found


def _grouped_mm_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, of_rows: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a grouped product; an empty tensor for one that is not requested."""
    none = grad.new_empty(0)
    grad = grad.contiguous()
    grad_rows = _grouped_mm(grad, weight.transpose(1, 2), counts) if of_rows else none
    if not of_weight:
        return grad_rows, none
    if _is_fast(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        found = torch.ops.aten._grouped_mm(_aligned(rows, 1).t(), _aligned(grad, 1), ends)
        return grad_rows, found[:, : weight.shape[1], : weight.shape[2]].contiguous()
    sizes = counts.tolist()
    parts = zip(rows.split(sizes), grad.split(sizes), strict=True)
    return grad_rows, torch.stack([part.t() @ each for part, each in parts])


def _is_fast(rows: Tensor) -> bool:
    """Return whether PyTorch has a grouped product for these rows."""
    return rows.dtype in FAST_DTYPES and rows.shape[0] > 0


def _aligned(matrix: Tensor, dims: int) -> Tensor:
    """Return a matrix with zeros behind its last dims, up to a multiple of ROW_BYTES, as grouped products need."""
    unit = ROW_BYTES // matrix.itemsize
    missing = [-size % unit for size in matrix.shape[-dims:]]
    return F.pad(matrix, [each for size in reversed(missing) for each in (0, size)]) if any(missing) else matrix


def _fake_grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[-1])


def _fake_grouped_mm_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, of_rows: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    none = grad.new_empty(0)
    return rows.new_empty(rows.shape) if of_rows else none, weight.new_empty(weight.shape) if of_weight else none


@called_directly
class GroupedProduct(torch.autograd.Function):
    """`autopar.grouped_mm`, whose formula PyTorch would call through more code in Python than it has itself."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, weight, counts)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.autopar.grouped_mm.default._op(rows, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, counts = ctx.saved_tensors
        of_rows, of_weight = ctx.needs_input_grad[:2]
        with torch._C._AutoDispatchBelowAutograd():
            backward = torch.ops.autopar.grouped_mm_backward.default._op
            grad_rows, grad_weight = backward(grad, rows, weight, counts, of_rows, of_weight)
        return grad_rows if of_rows else None, grad_weight if of_weight else None, None


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, counts = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    found = torch.ops.autopar.grouped_mm_backward(grad, rows, weight, counts, *wanted)
    return *(each if requested else None for each, requested in zip(found, wanted, strict=True)), None


for _schema in (
    "dispatch(Tensor x, Tensor index, int num_experts, bool dropping=False, float? padded=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "of_expert(Tensor values, Tensor ids, Tensor counts) -> Tensor",
    "combine(Tensor rows, Tensor? weights, Tensor route, Tensor counts, Tensor splits, bool dropping=False,"
    " float? padded=None) -> Tensor",
    "grouped_mm(Tensor rows, Tensor weight, Tensor counts) -> Tensor",
    "grouped_mm_backward(Tensor grad, Tensor rows, Tensor weight, Tensor counts, bool of_rows, bool of_weight)"
    " -> (Tensor, Tensor)",
):
    torch.library.define(f"autopar::{_schema.partition('(')[0]}", _schema[_schema.index("(") :])
# Composites: their derivatives are those of what they call.
torch.library.impl("autopar::dispatch", "CompositeImplicitAutograd", _dispatch)
torch.library.impl("autopar::of_expert", "CompositeImplicitAutograd", _of_expert)
torch.library.impl("autopar::combine", "CompositeImplicitAutograd", _combine)
torch.library.impl("autopar::grouped_mm", "default", _grouped_mm)
torch.library.impl("autopar::grouped_mm_backward", "default", _grouped_mm_backward)
torch.library.register_fake("autopar::grouped_mm", _fake_grouped_mm)
torch.library.register_fake("autopar::grouped_mm_backward", _fake_grouped_mm_backward)
torch.library.register_autograd("autopar::grouped_mm", _backward, setup_context=_save_for_backward)

DISPATCH: torch._ops.OpOverload = torch.ops.autopar.dispatch.default
"""x (T, D), index (T, K) → rows (R, D), counts (E), ids (R), route (T, K): the row of every slot, splits (2): unused.

Counts, ids, route and splits are int64, splits on the CPU; they are for the other operators alone.
"""
GROUPED_MM: torch._ops.OpOverload = torch.ops.autopar.grouped_mm.default
"""rows (R, D), weight (E, D, F), counts → (R, F)."""
OF_EXPERT: torch._ops.OpOverload = torch.ops.autopar.of_expert.default
"""values (E, ...), ids, counts → (R, ...): the entry of every row's expert, such as its bias."""
COMBINE: torch._ops.OpOverload = torch.ops.autopar.combine.default
"""rows (R, D), weights (T, K) or None, route, counts, splits → (T, D)."""
