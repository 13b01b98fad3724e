"""Attention under a mask that is an expression in vectors: worked out, and left out, block by block.

    attention_by_mask(query, key, value, vectors, mask, scale=None, dropout_p=0.0, sinks=None) -> y

`mask` is the text of an expression (`expressions`) in `vectors`, of truth values, or of what is added to the scores in
the type of the queries. No tensor has a dim of queries and one of keys but for one block, and that is not saved: the
backward makes it again. The vectors alone determine a query's position and hidden keys, so that queries,
and keys, may be given in any order, with their vectors in the same one. A query that sees no key gets zeros.

A mask that is a function of the scores ("score" in its text) gives what the softmax is taken of, -inf where a key is
hidden, and is worked out in float32 at least.

On a GPU one kernel takes all blocks (`flex_kernel`), but where something is dropped, with sinks, on a ring, and inside
of a graph that is compiled as a whole.

`sinks` are one more score of each query, by its head, to which no value belongs (module `sinks`).

`capture.masks` puts the operator in the place of `scaled_dot_product_attention`. Legend as in `kernels`.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar.ir.program.operators.attention import flex_kernel
from autopar.ir.program.operators.attention.dropout import Dropout, Range, lines_of
from autopar.ir.program.operators.attention.expressions import Expression, evaluate, parse, part_of, reads_scores
from autopar.ir.program.operators.attention.kernels import Block, Modified, takes_windows
from autopar.ir.program.operators.attention.masked_blocks import rows_of
from autopar.ir.program.operators.attention.sinks import gradient_of_sinks, with_sinks
from autopar.ir.program.operators.attention.sums import Gradients, Sum
from autopar.ir.program.operators.attention.tiles import tiles
from autopar.ir.program.operators.derivatives import once_differentiable

ALIGNED = 16
"""A row of a mask has a multiple of so many elements in memory, as the kernels of a GPU want it."""


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the factor by which scores are multiplied."""
    return scale if scale is not None else 1 / math.sqrt(query.shape[-1])


def _block(
    expression: Expression, vectors: Sequence[Tensor], queries: Range, keys: Range, q: Tensor, scale: float
) -> Block:
    """Build the kernel arguments of a block of scores, with its part of the mask."""
    parts = tuple(part_of(x, queries, keys) for x in vectors)
    if reads_scores(expression):
        return Block(scale, modified=Modified(expression, parts))
    mask = evaluate(expression, parts)
    shape = queries[1] - queries[0], keys[1] - keys[0]
    mask = mask.expand(*(1,) * (4 - mask.ndim), *mask.shape[:-2], *shape)
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    missing = -shape[1] % ALIGNED
    mask = pad(mask, (0, missing))[..., : shape[1]] if missing else mask.contiguous()
    return Block(scale, mask_BHST=mask)


def _blocks(
    text: str,
    vectors: Sequence[Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    dropout: Dropout | None,
    window: int | None,
) -> Iterator[tuple[Range, Range, Block]]:
    """Yield the queries, keys and scores of every block that is not hidden."""
    q, k, v = tensors
    all_queries, all_keys = (0, q.shape[-2]), (0, k.shape[-2])
    if window is not None and dropout is None and (window >= q.shape[-2] or takes_windows(q, v)):
        yield all_queries, all_keys, Block(scale, causal=True, window=window if window < q.shape[-2] else None)
        return
    expression = parse(text)
    for queries, blocks in rows_of(expression, vectors, q.shape[-2], k.shape[-2]):
        for keys, seen in blocks:
            block = Block(scale) if seen else _block(expression, vectors, queries, keys, q, scale)
            if dropout is not None:
                block = replace(block, dropout=dropout.part(queries, keys))
            yield from tiles(queries, keys, block, q)


def _dropout(p: float, rows: Tensor | None, columns: Tensor | None) -> Dropout | None:
    return None if rows is None or columns is None else Dropout(p, rows, columns)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, vectors: Sequence[Tensor]) -> None:
    """Raise RuntimeError, as PyTorch's own attention does, where shapes do not fit: the kernels do not look."""
    fit = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3] and q.shape[-1] == k.shape[-1]
    if not fit or q.shape[0] != k.shape[0] or 0 in k.shape or q.shape[1] % k.shape[1]:
        raise RuntimeError(
            f"found queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)}; needed are (batch, "
            "heads, positions, features) of one batch, with as many query heads as key heads or a multiple of them."
        )
    scores = *q.shape[:3], k.shape[2]
    for x in vectors:
        sizes = zip(x.shape, scores[4 - x.ndim :], strict=True)
        if any(size not in (1, whole) for size, whole in sizes) or (x.ndim > 1 and 1 not in x.shape[-2:]):
            raise RuntimeError(
                f"found a vector {list(x.shape)} of a mask for scores {list(scores)}; needed is one that is broadcast "
                "to these and has no dim of queries, or none of keys."
            )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Sequence[Tensor],
    mask: str,
    scale: float,
    p: float = 0.0,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    _check_shapes(q, k, v, vectors)
    total = Sum.empty(q, v)
    for queries, keys, block in _blocks(mask, vectors, (q, k, v), scale, _dropout(p, rows, columns), window):
        total.add(queries, keys, q, k, v, block)
    return total.out_BHSD, total.lse_BHS


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    mask: str,
    scale: float,
    p: float = 0.0,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = Gradients.empty(q, k, v)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a query that attends to nothing weighs all scores by zero
    for queries, keys, block in _blocks(mask, vectors, (q, k, v), scale, _dropout(p, rows, columns), window):
        sums.add(queries, keys, grad, q, k, v, out, lse, block)
    return sums.q_BHSD, sums.k_BGTD, sums.v_BGTD


def _fake_attend(q: Tensor, k: Tensor, v: Tensor, *further: Any) -> tuple[Tensor, Tensor]:
    total = Sum.empty(q, v)
    return total.out_BHSD, total.lse_BHS


def _fake_attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *further: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums = Gradients.empty(q, k, v)
    return sums.q_BHSD, sums.k_BGTD, sums.v_BGTD


class _ByMask(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: str,
        scale: float,
        p: float,
        rows: Tensor | None,
        columns: Tensor | None,
        window: int | None,
        sinks: Tensor | None,
        *vectors: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mask, ctx.scale, ctx.p, ctx.window = mask, scale, p, window
        out, lse = ATTEND(q, k, v, vectors, mask, scale, p, rows, columns, window)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, rows, columns, sinks, *vectors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, rows, columns, sinks, *vectors = ctx.saved_tensors
        specified = ctx.mask, ctx.scale, ctx.p, rows, columns, ctx.window
        dq, dk, dv = ATTEND_BACKWARD(grad, q, k, v, vectors, out, lse, *specified)
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *(None,) * 6, of_sinks, *(None,) * len(vectors)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vectors: Sequence[Tensor],
    mask: str,
    scale: float | None = None,
    seen: float = 1.0,
    rising: bool = False,
    reach: int | None = None,
    dropout_p: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    if not dropout_p and sinks is None and window is None and flex_kernel.takes(query, value):
        return flex_kernel.attention(query, key, value, vectors, mask, scale_of(query, scale))
    rows = columns = None
    if dropout_p:
        (samples, heads), device = query.shape[:2], query.device
        seed = torch.empty((), dtype=torch.int64, device=device).random_()
        lines = lines_of(seed, torch.arange(samples, device=device), torch.arange(heads, device=device))
        queries, keys = (torch.arange(x.shape[2], device=device) for x in (query, key))
        drawn = Dropout.of(dropout_p, lines, queries, keys)
        rows, columns = drawn.rows_BHS, drawn.columns_T
    specified = mask, scale_of(query, scale), dropout_p, rows, columns, window, sinks
    return _ByMask.apply(query, key, value, *specified, *vectors)


for _schema in (
    "attend_by_mask(Tensor q, Tensor k, Tensor v, Tensor[] vectors, str mask, float scale, float p=0.0,"
    " Tensor? rows=None, Tensor? columns=None, int? window=None) -> (Tensor, Tensor)",
    "attend_by_mask_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor[] vectors, Tensor out, Tensor lse,"
    " str mask, float scale, float p=0.0, Tensor? rows=None, Tensor? columns=None, int? window=None)"
    " -> (Tensor, Tensor, Tensor)",
    "attention_by_mask(Tensor query, Tensor key, Tensor value, Tensor[] vectors, str mask, float? scale=None,"
    " float seen=1.0, bool rising=False, int? reach=None, float dropout_p=0.0, int? window=None,"
    " Tensor? sinks=None) -> Tensor",
):
    torch.library.define(f"autopar::{_schema.partition('(')[0]}", _schema[_schema.index("(") :])
torch.library.impl("autopar::attend_by_mask", "default", _attend)
torch.library.impl("autopar::attend_by_mask_backward", "default", _attend_backward)
torch.library.register_fake("autopar::attend_by_mask", _fake_attend)
torch.library.register_fake("autopar::attend_by_mask_backward", _fake_attend_backward)
# A composite: its derivative is that of what it calls.
torch.library.impl("autopar::attention_by_mask", "CompositeImplicitAutograd", _attention)

ATTEND: torch._ops.OpOverload = torch.ops.autopar.attend_by_mask.default
"""Queries, keys and values → the result [B, H, S, D] and the log-sum-exp [B, H, S], in float32 at least.

Both are for merging with what further keys give; -inf stands for a query that sees none of these. With a dropout,
`rows` and `columns` are those of `Dropout`.
"""
ATTEND_BACKWARD: torch._ops.OpOverload = torch.ops.autopar.attend_by_mask_backward.default
"""The part of the gradients that these keys give, in float32 at least; `out` and `lse` are of whole rows."""
ATTENTION_BY_MASK: torch._ops.OpOverload = torch.ops.autopar.attention_by_mask.default
"""query (B, H, S, D), key and value (B, G, T, D), vectors → (B, H, S, D).

`seen` is the share of the scores that is computed, as far as that is known without data; `rising`: later queries see
more; `reach`: how many positions back a query may see, where none sees any ahead. A dropout is drawn from PyTorch's
default generator, unless it is split. `window`: the mask is that of queries which see so many positions up to their
own and no others, as those of the causal mask do; a kernel may take it in place of the vectors. `sinks` are broadcast
to the scores, whose last two dims they do not have: (H, 1, 1), or with a dim of 1 before.
"""
