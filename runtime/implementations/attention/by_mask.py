"""Attention under a mask of vectors whose sequences are split, as `by_blocks` says.

A rank has the vectors of its queries, and those of all keys, which are small: they do not travel with the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.by_mask import ATTEND, ATTEND_BACKWARD, scale_of
from autopar.ir.program.operators.attention.expressions import of_keys
from autopar.ir.program.operators.attention.sums import Gradients, Sum
from autopar.runtime.collectives.mesh_axes import IN_ORDER, Axes, num_parts_of
from autopar.runtime.implementations.attention.blocks import Piece
from autopar.runtime.implementations.attention.drawing import drawn, dropout_of
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.positions import KEYS, Split
from autopar.runtime.implementations.attention.steps import in_steps
from autopar.runtime.implementations.each_rank import Ranks


def attention_by_mask(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    vectors: Sequence[Tensor],
    mask: str,
    /,
    scale: float | None = None,
    seen: float = 1.0,
    rising: bool = False,
    reach: int | None = None,
    dropout_p: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    key: int | None = None,
) -> Tensor:
    """Compute `autopar.attention_by_mask.default` for this rank's queries and keys.

    With dropout, `key` identifies the call.

    Moves as much as `by_blocks.attention`; if queries see `reach` positions back, only the keys that other ranks see.
    """
    keys, value = shared_heads(query, keys, value, axes, sizes)
    call = _ByMask(Split.of(axes, zigzag, sizes[KEYS], reach), mask, scale_of(query, scale), dropout_p)
    dropping = None
    if dropout_p > 0:
        assert key is not None, "the rule gives calls with dropout a key"
        dropping = drawn(query, sizes[KEYS], dropout_p, key, axes, sizes, zigzag)
    return in_steps(query, keys, value, call, (dropping, *vectors), sinks)


@dataclass(frozen=True, slots=True)
class _ByMask:
    """A call whose blocks follow from vectors."""

    split: Split
    mask: str
    scale: float
    dropout_p: float

    def attend(self, ranks: Ranks, step: int, total: Sum, q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> None:
        drawn, *vectors = masks
        dropping = self._dropout(ranks, step, q, drawn)
        out, lse = ATTEND(q, k, v, self._vectors(ranks, step, vectors), self.mask, self.scale, *dropping)
        total.merge((0, q.shape[-2]), out, lse)

    def gradients(self, ranks: Ranks, step: int, sums: Gradients, given: tuple[Tensor, ...], *masks: Any) -> None:
        drawn, *vectors = masks
        grad, q, k, v, out, lse = given
        here, dropping = self._vectors(ranks, step, vectors), self._dropout(ranks, step, q, drawn)
        dq, dk, dv = ATTEND_BACKWARD(grad, q, k, v, here, out, lse, self.mask, self.scale, *dropping)
        sums.q_BHSD += dq
        sums.k_BGTD += dk
        sums.v_BGTD += dv

    def _dropout(
        self, ranks: Ranks, step: int, q: Tensor, drawn: Tensor | None
    ) -> tuple[float, Tensor | None, Tensor | None]:
        """Return the dropout probability, and the positions of the queries and keys on this rank."""
        if drawn is None:
            return 0.0, None, None
        split = self.split.queries
        queries = split.pieces(q.shape[-2] * num_parts_of(split.axes), ranks[: len(split.axes)])
        dropout = dropout_of(self.dropout_p, drawn, queries, self.split.keys_at(ranks, step), q.device)
        return dropout.p, dropout.rows_BHS, dropout.columns_T

    def _vectors(self, ranks: Ranks, step: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the vectors of this rank's queries, and those of the keys present at a step."""
        here, unmoved = self.split.keys_at(ranks, step), self.split.keys_unmoved(ranks)
        return [_elements_of(x, here, unmoved) if of_keys(x) else x for x in vectors]


def _elements_of(vector: Tensor, pieces: Sequence[Piece], unmoved: Sequence[Piece]) -> Tensor:
    if tuple(pieces) == tuple(unmoved):
        return vector
    around = [next(u for u in unmoved if u.first <= each.first and each.end <= u.end) for each in pieces]
    places = [u.places(each.first, each.end) for each, u in zip(pieces, around, strict=True)]
    return torch.cat([vector[..., slice(*each)] for each in places], -1)
