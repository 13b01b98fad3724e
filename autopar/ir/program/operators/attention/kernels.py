"""Attention of one block of queries and keys, with the log-sum-exp of its scores, forward and backward.

Legend: B leading dims as one, H query heads, G key heads (H a multiple of G), S queries, T keys, D features.

The backward takes the result and the log-sum-exp of a query's *whole* row, of which the block is a part: what it gives
is then that block's exact part of the gradient, and parts are summed as they are (Liu et al., "Ring Attention", 2023).

    kernel       taken for
    flash        a CPU; CUDA in half precision without a mask
    efficient    CUDA, else
    written out  what neither takes: values of another width than the keys on a CPU, float64 on CUDA, dropout, scores
                 that a function changes

With dropout the log-sum-exp is that of all scores: what is dropped still counts in the sum of a softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.dropout import Dropout, Range
from autopar.ir.program.operators.attention.expressions import Expression, part_of, with_derivative

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_ALIGNED = 32
"""The efficient kernel's log-sum-exp has a whole number of so many queries."""


@dataclass(frozen=True, slots=True)
class Modified:
    """A function of the scores of a block, of which the softmax is taken."""

    expression: Expression
    vectors: tuple[Tensor, ...]

    def part(self, queries: Range, keys: Range) -> Modified:
        """Return that of queries and keys at some places."""
        return Modified(self.expression, tuple(part_of(x, queries, keys) for x in self.vectors))


@dataclass(frozen=True, slots=True)
class Block:
    """Settings of a block of scores that forward and backward share."""

    scale: float
    causal: bool = False
    """Query i sees the keys up to the i-th one."""
    mask_BHST: Tensor | None = None
    """Values added to the scores, of their dtype and broadcastable (-inf hides a key); or truth values of seen keys."""
    dropout: Dropout | None = None
    window: int | None = None
    """Number of keys of a causal block up to the i-th one; None: all. Only for what `takes_windows`."""
    modified: Modified | None = None

    def part(self, queries: Range, keys: Range, columns: Range | None = None, causal: bool = False) -> Block:
        """Return the block of a range of queries and keys.

        `columns` is the range of the mask's keys if it differs from `keys`.
        """
        mask = self.mask_BHST
        if mask is not None:
            rows = mask if mask.shape[-2] == 1 else mask[..., slice(*queries), :]
            mask = rows if mask.shape[-1] == 1 else rows[..., slice(*(columns or keys))]
        dropout = self.dropout.part(queries, keys) if self.dropout is not None else None
        modified = self.modified.part(queries, keys) if self.modified is not None else None
        return Block(self.scale, causal, mask, dropout, modified=modified)


def attend(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return the result [B, H, S, D], and the log-sum-exp [B, H, S], which is -inf for a query that sees no key."""
    block = _with_numbers(block, q_BHSD)
    out, lse_BHS = _KERNELS[_kernel(q_BHSD, v_BGTD, block)].forward(q_BHSD, k_BGTD, v_BGTD, block)
    if block.mask_BHST is not None:  # a kernel says 0 of a row without keys
        dead = (block.mask_BHST == -math.inf).all(-1)
        lse_BHS = lse_BHS.masked_fill(dead, -math.inf)
    return out, lse_BHS


def attend_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's part of the gradients of queries, keys and values; `out` and `lse` are of whole rows.

    `lse` is inf, not -inf, for a query that sees no key at all.
    """
    block = _with_numbers(block, q_BHSD)
    kernel = _KERNELS[_kernel(q_BHSD, v_BGTD, block)]
    return kernel.backward(grad_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD, lse_BHS, block)


def _with_numbers(block: Block, q: Tensor) -> Block:
    """Return the block with a mask of numbers, as kernels take it, in place of one of truth values."""
    mask = block.mask_BHST
    if mask is None or mask.dtype is not torch.bool:
        return block
    numbers = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    return replace(block, mask_BHST=numbers.masked_fill_(~mask, -math.inf))


def _kernel(q: Tensor, v: Tensor, block: Block) -> str:
    if block.dropout is not None or block.modified is not None:
        return "written_out"
    same_width = q.shape[-1] == v.shape[-1]
    if q.is_cuda:
        if q.dtype in _HALF and block.mask_BHST is None and same_width and q.shape[-1] <= 256:
            return "flash_cuda"
        return "efficient" if q.dtype is not torch.float64 else "written_out"
    return "flash_cpu" if same_width and q.is_cpu else "written_out"


def takes_windows(q_BHSD: Tensor, v_BGTD: Tensor) -> bool:
    """Return whether the kernel of a block without a mask takes a window."""
    return _kernel(q_BHSD, v_BGTD, Block(1.0)) == "flash_cuda"


class _FlashCpu:
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.causal, attn_mask=block.mask_BHST, scale=block.scale
        )

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.causal, attn_mask=block.mask_BHST, scale=block.scale
        )


class _FlashCuda:
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        if block.window is not None:
            tensors = (x.transpose(1, 2) for x in (q, k, v))
            lengths = None, None, q.shape[-2], k.shape[-2]
            out, lse, *_ = aten._flash_attention_forward(
                *tensors, *lengths, 0.0, False, False, scale=block.scale, **_sides(block.window)
            )
            return out.transpose(1, 2), lse
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, block.causal, scale=block.scale)
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        if block.window is not None:
            tensors = (x.transpose(1, 2) for x in (grad, q, k, v, out))
            lengths, seeds = (None, None, q.shape[-2], k.shape[-2]), (no_seed, no_seed[:0])
            dq, dk, dv = aten._flash_attention_backward(
                *tensors, lse, *lengths, 0.0, False, *seeds, scale=block.scale, **_sides(block.window)
            )
            return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        return aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[-2],
            k.shape[-2],
            0.0,
            block.causal,
            no_seed,
            no_seed[:0],
            scale=block.scale,
        )


def _sides(window: int) -> dict[str, int]:
    """Return the keys before and behind its own that a query sees, as flash attention is told."""
    return {"window_size_left": window - 1, "window_size_right": 0}


class _Efficient:
    """Takes no grouped heads: keys and values are repeated, and their gradients summed over the groups."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        k, v = _repeated(q, k), _repeated(q, v)
        bias = _expanded(block.mask_BHST, q, k)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, block.causal, scale=block.scale
        )
        return out, lse[..., : q.shape[-2]]

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        missing = -lse.shape[-1] % _ALIGNED
        lse = torch.nn.functional.pad(lse, (0, missing), value=math.inf).contiguous()
        many, values = _repeated(q, k), _repeated(q, v)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            many,
            values,
            _expanded(block.mask_BHST, q, many),
            out,
            lse,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            block.causal,
            scale=block.scale,
        )
        return dq, _summed(dk, k), _summed(dv, v)


class _WrittenOut:
    """Scores as a tensor of their own, in float32 at least."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        scores, _ = _scores(q, k, block)
        lse = scores.logsumexp(-1)
        weights, values = _weights(scores, lse), _repeated(q, v).to(scores.dtype)
        if block.dropout is None:
            return weights @ values, lse
        return weights.masked_fill_(block.dropout.dropped(), 0.0) @ values * block.dropout.scale, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, change = _scores(q, k, block)
        wide = scores.dtype
        weights = _weights(scores, lse.to(wide))
        grad, keys, values = grad.to(wide), _repeated(q, k).to(wide), _repeated(q, v).to(wide)
        level = (grad * out.to(wide)).sum(-1, keepdim=True)
        kept = weights
        if block.dropout is None:
            of_weights = grad @ values.mT
        else:
            dropped, grad = block.dropout.dropped(), grad * block.dropout.scale
            of_weights, kept = (grad @ values.mT).masked_fill_(dropped, 0.0), weights.masked_fill(dropped, 0.0)
        of_scores = weights * (of_weights - level) * block.scale
        of_scores = of_scores if change is None else of_scores * change
        return of_scores @ keys, _summed(of_scores.mT @ q.to(wide), k), _summed(kept.mT @ grad, v)


def _scores(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
    """Return the scores, and the derivatives of modified ones."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ _repeated(q, k).to(wide).mT) * block.scale
    if block.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if block.modified is not None:
        return with_derivative(block.modified.expression, block.modified.vectors, scores)
    return scores if block.mask_BHST is None else scores + block.mask_BHST, None


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse); zeros in rows that see no key."""
    return (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp()


def _repeated(q: Tensor, k: Tensor) -> Tensor:
    """Return the keys or values with a head for each query head."""
    return k if q.shape[1] == k.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _summed(grad: Tensor, k: Tensor) -> Tensor:
    """Return the gradient of keys or values, summed over the query heads that share them."""
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _expanded(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2])


_KERNELS = {"flash_cpu": _FlashCpu, "flash_cuda": _FlashCuda, "efficient": _Efficient, "written_out": _WrittenOut}
