"""Attention whose keys come to a rank in several steps, around a ring of ranks, or whose results ranks merge."""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, autograd
from torch.nn.functional import pad

from autopar.program.operators.attention.sums import Gradients, Sum
from autopar.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.axes import Axis
from autopar.runtime.collectives.functions import raw_all_reduce
from autopar.runtime.collectives.ring import Travelling
from autopar.runtime.implementations.attention.places import Ranks, Split, on_each_rank


class Local(Protocol):
    """What a rank computes with the keys that it has after so many steps; `ranks` is where it stands."""

    @property
    def split(self) -> Split: ...

    def attend(self, ranks: Ranks, step: int, total: Sum, q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> None:
        """Add these keys' part of the result to the total."""
        ...

    def gradients(self, ranks: Ranks, step: int, sums: Gradients, given: tuple[Tensor, ...], *masks: Any) -> None:
        """Add these keys' part; `given` are the gradient, queries, keys, values, and whole rows' result and lse."""
        ...


def in_steps(q: Tensor, k: Tensor, v: Tensor, call: Local, masks: Sequence[Tensor | None]) -> Tensor:
    """The result [B, H, S, D] for this rank's queries; `masks` is what `call` needs beside, and stays on its rank."""
    return _InSteps.apply(q, k, v, call, *masks)


class _InSteps(autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Local, *masks: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        split = call.split
        total: tuple[Any, ...] = ()
        keys: list[Tensor] = [k, v]

        def compute(ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, *further: Any) -> Any:
            so_far = further[len(masks) :]
            sums = Sum(so_far[0], so_far[1]) if so_far else Sum.empty(q, v)
            call.attend(ranks, step, sums, q, k, v, *further[: len(masks)])
            return sums.out_BHSD, sums.lse_BHS

        for step in range(split.num_steps):
            under_way = _sent_on(keys, split, step)
            total = tuple(on_each_rank(compute, split.axes, (q, *keys, *masks, *total)))
            if under_way is not None:
                keys = under_way.arrived()
        out, lse = _merged(total[0], total[1], split.merged)
        out = out.to(q.dtype)
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # of a query that sees nothing no score has a weight
        ctx.save_for_backward(q, k, v, out, lse, *masks)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, *masks = ctx.saved_tensors
        call: Local = ctx.call
        split = call.split
        grad = grad.contiguous()

        def compute(ranks: Ranks, *given: Any) -> Any:
            here, so_far = given[:6], given[6 + len(masks) :]
            sums = Gradients.empty(*here[1:4])
            if so_far:
                (sums.q_BHSD,) = so_far
            call.gradients(ranks, step, sums, here, *given[6 : 6 + len(masks)])
            return sums.q_BHSD, sums.k_BGTD, sums.v_BGTD

        keys: list[Tensor] = [k, v]
        of_queries: list[Tensor] = []
        own: list[Tensor] = []
        coming: Travelling | None = None
        """Gradients of the keys that are here, as far as the ranks before this one have made them."""
        for step in range(split.num_steps):
            last = step + 1 == split.num_steps
            under_way = _sent_on(keys, split, step)
            dq, *of_keys = on_each_rank(compute, split.axes, (grad, q, *keys, out, lse, *masks, *of_queries))
            of_queries = [dq]
            if step == 0:
                own = of_keys
            else:
                assert split.ring is not None, "only around a ring is there a second step"
                # At last they go home, from as far as the keys have come.
                coming = Travelling(_added(of_keys, coming), split.ring, -step if last else 1)
            if under_way is not None:
                keys = under_way.arrived()
        (dq,), (dk, dv) = of_queries, _added(own, coming)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, *(None,) * len(masks)


def _sent_on(keys: Sequence[Tensor], split: Split, step: int) -> Travelling | None:
    """The keys and values that the next rank has in its next step, on their way; None where no rank needs them."""
    if split.ring is None or step + 1 == split.num_steps:
        return None
    count = split.arriving[step]
    return Travelling([x.narrow(-2, x.shape[-2] - count, count) for x in keys], split.ring)


def _added(own: Sequence[Tensor], coming: Travelling | None) -> list[Tensor]:
    """This rank's part of gradients, with that of the ranks before it; either may be of the last positions alone."""
    if coming is None:
        return list(own)
    return [_sum_at_end(mine, others) for mine, others in zip(own, coming.arrived(), strict=True)]


def _sum_at_end(a: Tensor, b: Tensor) -> Tensor:
    short, long = (a, b) if a.shape[-2] < b.shape[-2] else (b, a)
    missing = long.shape[-2] - short.shape[-2]
    return long + (pad(short, (0, 0, missing, 0)) if missing else short)


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
