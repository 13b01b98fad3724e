"""The sum of blocks of attention.

Results are merged by the log-sum-exp of their scores (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.dropout import Range
from autopar.ir.program.operators.attention.kernels import Block, attend, attend_backward


@dataclass(slots=True)
class Sum:
    """The result of the blocks so far, in float32 at least, with the log-sum-exp of their scores."""

    out_BHSD: Tensor
    lse_BHS: Tensor

    @classmethod
    def empty(cls, q_BHSD: Tensor, v_BGTD: Tensor) -> Sum:
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        batch, heads, queries, _ = q_BHSD.shape
        # Same memory layout as the kernels' outputs: (batch, position, head).
        out = q_BHSD.new_zeros((batch, queries, heads, v_BGTD.shape[-1]), dtype=wide).transpose(1, 2)
        return cls(out, q_BHSD.new_full(q_BHSD.shape[:-1], -math.inf, dtype=wide))

    def add(
        self,
        queries: Range,
        keys: Range,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: Block,
        way: Callable[..., tuple[Tensor, Tensor]] = attend,
    ) -> None:
        """Attend by one block more."""
        mine, theirs = slice(*queries), slice(*keys)
        self.merge(queries, *way(q[:, :, mine], k[:, :, theirs], v[:, :, theirs], block))

    def merge(self, queries: Range, out: Tensor, lse: Tensor) -> None:
        """Add what some queries have found with further keys."""
        mine = slice(*queries)
        before, lse = self.lse_BHS[:, :, mine], lse.to(self.lse_BHS.dtype)
        both = torch.logaddexp(before, lse)
        level = both.masked_fill(both == -math.inf, 0.0)
        result = self.out_BHSD[:, :, mine]
        result.mul_((before - level).exp_().unsqueeze(-1)).addcmul_(
            out.to(result.dtype), (lse - level).exp_().unsqueeze(-1)
        )
        self.lse_BHS[:, :, mine] = both


@dataclass(slots=True)
class Gradients:
    """The gradients of queries, keys and values so far, in float32 at least."""

    q_BHSD: Tensor
    k_BGTD: Tensor
    v_BGTD: Tensor

    @classmethod
    def empty(cls, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        return cls(*(x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)))

    def add(
        self,
        queries: Range,
        keys: Range,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        way: Callable[..., tuple[Tensor, Tensor, Tensor]] = attend_backward,
    ) -> None:
        """Add the part of one block; `out` and `lse` are those of whole rows."""
        mine, theirs = slice(*queries), slice(*keys)
        grad, q, out = (x[:, :, mine] for x in (grad, q, out))
        lse = lse[:, :, mine].contiguous()  # kernels of a GPU read it as if it were
        dq, dk, dv = way(grad, q, k[:, :, theirs], v[:, :, theirs], out, lse, block)
        self.q_BHSD[:, :, mine] += dq
        self.k_BGTD[:, :, theirs] += dk
        self.v_BGTD[:, :, theirs] += dv
