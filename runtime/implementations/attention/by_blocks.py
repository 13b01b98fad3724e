"""Attention whose sequences are split: each rank computes the blocks of scores that its queries need.

An axis may split

    the queries         keys and values are whole on it, gathered before; keys behind the queries are not computed
    both, together      keys and values travel around a ring while the ranks compute with what they have; their
                        gradients travel with them, and are home after n - 1 steps ("ring attention", Liu et al. 2023)
    the keys            each rank has a part of every result, which are merged by their log-sum-exp

and axes may do different things, as in Ulysses inside of a ring ("USP", Fang and Zhao 2024) or 2D attention
("LoongTrain", Gu et al. 2024). No tensor has a dim of queries and one of keys.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.axes import Axes, Axis, axes_of, axis_of, num_parts_of
from autopar.runtime.collectives.functions import raw_all_reduce
from autopar.runtime.collectives.ring import Travelling
from autopar.runtime.implementations.attention.blocks import Gradients, Pair, Sum, pairs_of
from autopar.runtime.implementations.attention.kernels import Block
from autopar.runtime.implementations.attention.places import Dealing, Ranks, on_each_rank
from autopar.sharding.mesh import joined_name

QUERIES, KEYS = "s", "t"


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
    zigzag: Collection[str] = (),
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `aten.scaled_dot_product_attention.default` without dropout, for the queries and keys that this rank holds.

    A mask has this rank's queries, and is split as the keys are by axes that split keys alone.

    Moves, over n ranks that split both: n - 1 times keys and values forward, and backward as often these and, but for
    once in float32, their gradients. Over ranks that split keys alone: the result and two
    numbers per query forward.
    """
    assert dropout_p == 0, "the rule uses this for calls without dropout"
    q, k, v, mask = _four_dims(query, keys, value, attn_mask)
    ring = tuple(name for name in axes.get(KEYS, ()) if name in axes.get(QUERIES, ()))
    split = _Split(
        Dealing(axes_of(axes.get(QUERIES, ())), QUERIES in zigzag),
        Dealing(axes_of(axes.get(KEYS, ())), KEYS in zigzag),
        axis_of(joined_name(ring, range(len(ring)))) if axes_of(ring) else None,
        axes_of(name for name in axes.get(KEYS, ()) if name not in ring),
        is_causal,
        scale if scale is not None else 1 / math.sqrt(query.shape[-1]),
        # Where queries are padded there are more of them than the whole has.
        q.shape[-2] * num_parts_of(axes_of(axes.get(QUERIES, ()))),
        sizes[KEYS],
    )
    out = _ByBlocks.apply(q, k, v, mask, split)
    return out.view(*query.shape[:-1], value.shape[-1])


def _four_dims(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys and values with one leading dim, and a dim of heads; a mask is added to the scores."""
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    if q.ndim == 4:
        return q, k.expand(q.shape[0], *k.shape[1:]), v.expand(q.shape[0], *v.shape[1:]), mask
    leading = q.shape[:-3]
    heads = q.shape[-3:-2] if q.ndim > 2 else (1,)

    def widened(x: Tensor) -> Tensor:
        own = x.shape[-3:-2] if q.ndim > 2 else (1,)
        return x.expand(*leading, *own, *x.shape[-2:]).reshape(-1, *own, *x.shape[-2:])

    if mask is not None:
        mask = mask.expand(*leading, *(heads if q.ndim > 2 else ()), *mask.shape[-2:])
        mask = mask.reshape(-1, *heads, *mask.shape[-2:])
    return widened(q), widened(k), widened(v), mask


@dataclass(frozen=True, slots=True)
class _Split:
    """How the mesh splits a call."""

    queries: Dealing
    keys: Dealing
    ring: Axis | None
    """The axes that split both, as one."""
    merged: tuple[Axis, ...]
    """Those that split keys alone."""
    causal: bool
    scale: float
    num_queries: int
    num_keys: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those that say where a rank stands: of queries, and of keys alone."""
        return (*self.queries.axes, *self.merged)

    @property
    def num_steps(self) -> int:
        return self.ring.size if self.ring is not None else 1

    def block(self, mask: Tensor | None) -> Block:
        return Block(self.scale, mask_BHST=mask)

    def pairs(self, ranks: Ranks, step: int) -> tuple[Pair, ...]:
        """The blocks that a rank computes with the keys that it has after so many steps around the ring."""
        stands = {axis.name: rank for axis, rank in zip(self.axes, ranks, strict=True)}
        of_queries = self.queries.pieces(self.num_queries, ranks[: len(self.queries.axes)])
        around = [axis for axis in self.keys.axes if axis not in self.merged]
        place = -step
        for axis in reversed(around):  # the rank that these keys came from, outer axis first
            place += stands[axis.name]
            stands[axis.name], place = place % axis.size, place // axis.size
        of_keys = self.keys.pieces(self.num_keys, tuple(stands[axis.name] for axis in self.keys.axes))
        of_mask = Dealing(self.merged, self.keys.zigzag).pieces(
            self.num_keys, tuple(stands[axis.name] for axis in self.merged)
        )
        return pairs_of(of_queries, of_keys, of_mask, self.causal)


class _ByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, split: _Split) -> Tensor:
        ctx.set_materialize_grads(False)
        total: tuple[Any, ...] = ()
        keys: list[Tensor] = [k, v]

        def compute(ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *sums: Tensor) -> Any:
            total = Sum(sums[0], sums[1]) if sums else Sum.empty(q, v)
            total.add(split.pairs(ranks, step), q, k, v, split.block(mask))
            return total.out_BHSD, total.lse_BHS

        for step in range(split.num_steps):
            under_way = Travelling(keys, split.ring) if split.ring is not None and step + 1 < split.num_steps else None
            total = tuple(on_each_rank(compute, split.axes, (q, *keys, mask, *total)))
            if under_way is not None:
                keys = under_way.arrived()
        out, lse = _merged(*total, split.merged)
        out = out.to(q.dtype)
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # of a query that sees nothing no score has a weight
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.split = split
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        split: _Split = ctx.split
        grad = grad.contiguous()

        def compute(ranks: Ranks, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any, *kept: Tensor) -> Any:
            out, lse, *so_far = kept
            sums = Gradients(so_far[0], so_far[1], so_far[2]) if so_far else Gradients.empty(q, k, v)
            sums.add(split.pairs(ranks, step), grad, q, k, v, out, lse, split.block(mask))
            return sums.q_BHSD, sums.k_BGTD, sums.v_BGTD

        keys: list[Tensor] = [k, v]
        dq: Tensor | None = None
        own: list[Tensor] = []
        of_others: list[Tensor] = []
        """Gradients of the keys that are here, as far as the ranks before this one have made them."""
        for step in range(split.num_steps):
            last = step + 1 == split.num_steps
            under_way = Travelling(keys, split.ring) if split.ring is not None and not last else None
            if dq is None:
                dq, *own = on_each_rank(compute, split.axes, (grad, q, *keys, mask, out, lse))
            else:
                arrived = of_others or [x.new_zeros(x.shape, dtype=dq.dtype) for x in keys]
                dq, *of_others = on_each_rank(compute, split.axes, (grad, q, *keys, mask, out, lse, dq, *arrived))
                of_others = Travelling(of_others, split.ring).arrived()  # type: ignore[arg-type]
            if under_way is not None:
                keys = under_way.arrived()
        assert dq is not None
        dk, dv = (mine + other for mine, other in zip(own, of_others, strict=True)) if of_others else own
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _merged(out: Tensor, lse: Tensor, axes: tuple[Axis, ...]) -> tuple[Tensor, Tensor]:
    """The results of ranks that have seen different keys, as one."""
    for axis in axes:
        level = raw_all_reduce(lse, axis, "max")
        level = level.masked_fill(level == -math.inf, 0.0)
        weight = (lse - level).exp()
        total = raw_all_reduce(weight, axis)
        out = raw_all_reduce(out * weight.unsqueeze(-1), axis) / total.clamp(min=1e-45).unsqueeze(-1)
        lse = total.log() + level
    return out, lse
