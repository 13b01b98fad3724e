"""Ring self-attention: a rank has whole rows of scores, to which keys come around a ring of ranks, and then values.

As Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective" (2021), have it. The softmax of the
rows, queries of this rank by all keys, is saved for the backward; no log-sum-exp merges blocks.

Legend: B heads of keys, of all samples, N the rows of one: queries of all heads that share it, T all keys, D features.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, autograd

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.layout_moves import raw_reduce_scatter
from autopar.runtime.collectives.mesh_axes import IN_ORDER, Axes, axes_of, num_parts_of
from autopar.runtime.implementations.attention.by_blocks import four_dims
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.positions import KEYS, QUERIES, Split, positions
from autopar.runtime.implementations.attention.steps import sent
from autopar.runtime.implementations.each_rank import Ranks, on_each_rank


def attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    /,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `aten.scaled_dot_product_attention.default` without dropout for this rank's queries and keys.

    A mask of truth values has this rank's queries and all keys. Keys are split by axes that split queries, too.

    Moves, over n ranks that split both: n - 1 times keys and values forward, and backward as often; and the gradients
    of all keys and values by reduce-scatter.
    """
    assert dropout_p == 0, "the rule uses this for calls without dropout"
    keys, value = shared_heads(query, keys, value, axes, sizes)
    q, k, v, mask = four_dims(query, keys, value, attn_mask)
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    num_queries = q.shape[-2] * num_parts_of(axes_of(axes.get(QUERIES, ())))
    rows = _Rows(Split.of(axes, zigzag, sizes[KEYS]), is_causal, scale, num_queries, q.shape[1])
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    out = _RingSelfAttention.apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, rows)
    return out.view(*query.shape[:-1], value.shape[-1])


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of scores that ranks have, with their columns in the order of positions."""

    split: Split
    causal: bool
    scale: float
    num_queries: int
    """Number of queries of all ranks."""
    num_heads: int
    """Number of heads of this rank's queries."""

    def columns(self, ranks: Ranks, step: int) -> Iterator[tuple[slice, slice]]:
        """Yield the columns of the keys that a rank has after so many steps, and their range in the whole."""
        for piece in self.split.keys_at(ranks, step):
            yield slice(piece.first, piece.end), slice(piece.at, piece.at + piece.size)

    def hide(self, ranks: Ranks, scores_BNT: Tensor, mask: Tensor | None) -> None:
        """Give keys that a query does not see the score -inf."""
        num_here = self.num_queries // num_parts_of(self.split.queries.axes)
        scores_BHST = scores_BNT.view(-1, self.num_heads, num_here, scores_BNT.shape[-1])
        if mask is not None:
            scores_BHST.masked_fill_(~mask, -math.inf)
        if self.causal:
            axes, device = self.split.queries.axes, scores_BNT.device
            queries = positions(self.split.queries.pieces(self.num_queries, ranks[: len(axes)]), device)
            keys = torch.arange(self.split.num_keys, device=device)
            scores_BHST.masked_fill_(keys > queries.unsqueeze(-1), -math.inf)

    def by_rank(self, x_BTD: Tensor) -> Tensor:
        """Reorder a tensor from the order of positions to the order of the ranks that have them."""
        keys = self.split.keys
        if not keys.zigzag:
            return x_BTD
        stands = itertools.product(*(range(axis.size) for axis in keys.axes))
        pieces = [piece for ranks in stands for piece in keys.pieces(self.split.num_keys, ranks)]
        return torch.cat([x_BTD[:, piece.first : piece.end] for piece in pieces], -2)


class _RingSelfAttention(autograd.Function):
    """Queries and the result are [B, N, D], keys and values [B, T/n, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: _Rows) -> Tensor:
        def weigh(ranks: Ranks, scores: Tensor, mask: Tensor | None) -> Sequence[Tensor]:
            rows.hide(ranks, scores, mask)
            weights = scores.softmax(-1)
            return (weights if mask is None else weights.masked_fill_(scores == -math.inf, 0.0),)

        scores = _products(q * rows.scale, k, rows)
        (weights,) = on_each_rank(weigh, rows.split.axes, (scores, mask))
        del scores
        out = _sums(weights, v, rows).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, weights)
        ctx.rows = rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, weights = ctx.saved_tensors
        rows: _Rows = ctx.rows
        of_weights = _products(grad, v, rows)
        dv = _home(weights.mT @ grad, rows)
        of_scores = of_weights.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
        dk = _home(of_scores.mT @ (q * rows.scale), rows)
        dq = _sums(of_scores, k, rows).mul_(rows.scale).to(q.dtype)
        return dq, dk, dv, None, None


def _products(x_BND: Tensor, own: Tensor, rows: _Rows) -> Tensor:
    """Return [B, N, T]: each row by all keys, or values, of which a rank has its `own`."""

    def multiply(ranks: Ranks, step: int, here: Tensor, found: Tensor, x: Tensor) -> Sequence[Tensor]:
        for columns, place in rows.columns(ranks, step):
            found[..., columns].baddbmm_(x, here[:, place].mT, beta=0)
        return (found,)

    found = x_BND.new_empty((*x_BND.shape[:-1], rows.split.num_keys))
    return _around_ring(multiply, own, rows, found, x_BND)


def _sums(x_BNT: Tensor, own: Tensor, rows: _Rows) -> Tensor:
    """Return [B, N, D], in float32 at least: all keys, or values, by the weights of each row."""

    def add(ranks: Ranks, step: int, here: Tensor, found: Tensor, x: Tensor) -> Sequence[Tensor]:
        for columns, place in rows.columns(ranks, step):
            found += x[..., columns] @ here[:, place]
        return (found,)

    wide = torch.promote_types(x_BNT.dtype, torch.float32)
    return _around_ring(add, own, rows, x_BNT.new_zeros((*x_BNT.shape[:-1], own.shape[-1]), dtype=wide), x_BNT)


def _around_ring(
    compute: Callable[..., Sequence[Tensor]], own: Tensor, rows: _Rows, found: Tensor, x: Tensor
) -> Tensor:
    """Run `compute` with the keys, or values, of one rank after the other, while those of the next are in transit."""
    here = [own]
    for step in range(rows.split.num_steps):
        under_way = sent(here, [own], rows.split, step)

        def at_step(ranks: Ranks, *given: Tensor, step: int = step) -> Sequence[Tensor]:
            return compute(ranks, step, *given)

        (found,) = on_each_rank(at_step, rows.split.axes, (here[0], found, x))
        if under_way is not None:
            here = under_way.arrived()
    return found


def _home(grad_BTD: Tensor, rows: _Rows) -> Tensor:
    """Return the sum of all ranks' gradients of this rank's keys, or values."""
    ring = rows.split.ring
    return grad_BTD if ring is None else raw_reduce_scatter(rows.by_rank(grad_BTD), ring, 1)
