"""Attention whose keys come to a rank in several steps, around a ring of ranks, or whose results ranks merge."""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, autograd
from torch.nn.functional import pad

from autopar.ir.program.operators.attention.hops import Hop, chains_of
from autopar.ir.program.operators.attention.sinks import gradient_of_sinks, with_sinks
from autopar.ir.program.operators.attention.sums import Gradients, Sum
from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.layout_moves import raw_all_reduce
from autopar.runtime.collectives.mesh_axes import Axis
from autopar.runtime.implementations.attention.positions import Split
from autopar.runtime.implementations.attention.ring import Travelling
from autopar.runtime.implementations.each_rank import Ranks, on_each_rank


class Local(Protocol):
    """Computation of a rank with the keys that it has at a step; `ranks` are its coordinates."""

    @property
    def split(self) -> Split: ...

    def attend(self, ranks: Ranks, step: int, total: Sum, q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> None:
        """Add these keys' part of the result to the total."""
        ...

    def gradients(self, ranks: Ranks, step: int, sums: Gradients, given: tuple[Tensor, ...], *masks: Any) -> None:
        """Add these keys' part; `given` are the gradient, queries, keys, values, and whole rows' result and lse."""
        ...


def in_steps(
    q: Tensor, k: Tensor, v: Tensor, call: Local, masks: Sequence[Tensor | None], sinks: Tensor | None = None
) -> Tensor:
    """Return the result [B, H, S, D] for this rank's queries; `masks` are arguments of `call` that do not move."""
    return _InSteps.apply(q, k, v, sinks, call, *masks)


class _InSteps(autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Local, *masks: Tensor | None
    ) -> Tensor:
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
            under_way = sent(keys, (k, v), split, step)
            total = tuple(on_each_rank(compute, split.axes, (q, *keys, *masks, *total)))
            if under_way is not None:
                keys = under_way.arrived()
        out, lse = merged(total[0], total[1], split.merged)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # a query that attends to nothing weighs all scores by zero
        ctx.save_for_backward(q, k, v, out, lse, sinks, *masks)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, sinks, *masks = ctx.saved_tensors
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
        home: list[tuple[Travelling, Hop]] = []
        """Gradients of this rank's keys, of which those that the hop has taken."""
        chains = chains_of(split.hops)
        for step in range(split.num_steps):
            under_way = sent(keys, (k, v), split, step)
            dq, *of_keys = on_each_rank(compute, split.axes, (grad, q, *keys, out, lse, *masks, *of_queries))
            of_queries = [dq]
            if step == 0:
                own = of_keys
            else:
                assert split.ring is not None, "only around a ring is there a second step"
                hop, chain = split.hops[step - 1], chains[step - 1]
                so_far = of_keys if coming is None else _added(coming.arrived(), of_keys, hop.first - chain.first)
                if step < len(chains) and chains[step] is chain:
                    coming = Travelling(so_far, split.ring)
                else:
                    home.append((Travelling(so_far, split.ring, -hop.source), chain))
                    coming = None
            if under_way is not None:
                keys = under_way.arrived()
        for arriving, chain in home:
            own = _added(own, arriving.arrived(), chain.first)
        (dq,), (dk, dv) = of_queries, own
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, *(None,) * len(masks)


def sent(here: Sequence[Tensor], own: Sequence[Tensor], split: Split, step: int) -> Travelling | None:
    """Return the keys and values that others have in the next step, on their way; None where that was the last one.

    They are of what is here, which has come in hops, or this rank's own.
    """
    if split.ring is None or step == len(split.hops):
        return None
    hop = split.hops[step]
    if not hop.relayed:
        return Travelling([x.narrow(-2, hop.first, hop.size) for x in own], split.ring, hop.source)
    begin = hop.first - split.hops[step - 1].first
    return Travelling([x.narrow(-2, begin, hop.size) for x in here], split.ring)


def _added(sums: Sequence[Tensor], parts: Sequence[Tensor], first: int) -> list[Tensor]:
    """Return the sums with what is to be added to them from a position on."""

    def widened(x: Tensor, size: int) -> Tensor:
        return pad(x, (0, 0, first, size - first - x.shape[-2])) if x.shape[-2] < size else x

    return [x + widened(y, x.shape[-2]) for x, y in zip(sums, parts, strict=True)]


def merged(out: Tensor, lse: Tensor, axes: tuple[Axis, ...]) -> tuple[Tensor, Tensor]:
    """Return the results of ranks that have seen different keys, as one."""
    for axis in axes:
        level = raw_all_reduce(lse, axis, "max")
        level = level.masked_fill(level == -math.inf, 0.0)
        weight = (lse - level).exp()
        total = raw_all_reduce(weight, axis)
        out = raw_all_reduce(out * weight.unsqueeze(-1), axis) / total.clamp(min=1e-45).unsqueeze(-1)
        lse = total.log() + level
    return out, lse
