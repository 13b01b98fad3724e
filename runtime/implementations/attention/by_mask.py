"""Attention under a mask of vectors whose sequences are split, as `by_blocks` says.

A rank has the vectors of its queries, and those of all keys, which are small: they do not travel with the keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.program.operators.attention.by_mask import ATTEND, ATTEND_BACKWARD, of_keys, scale_of
from autopar.program.operators.attention.sums import Gradients, Sum
from autopar.runtime.collectives.axes import Axes
from autopar.runtime.implementations.attention.blocks import Piece
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.places import KEYS, Ranks, Split
from autopar.runtime.implementations.attention.steps import in_steps


def attention_by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vectors: Sequence[Tensor],
    mask: str,
    scale: float | None = None,
    seen: float = 1.0,
    rising: bool = False,
    reach: int | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Collection[str] = (),
) -> Tensor:
    """As `autopar.attention_by_mask.default`, for the queries and keys that this rank holds.

    Moves what `by_blocks.attention` does; where queries see `reach` positions back, of keys those that others see.
    """
    key, value = shared_heads(query, key, value, axes, sizes)
    return in_steps(
        query, key, value, _ByMask(Split.of(axes, zigzag, sizes[KEYS], reach), mask, scale_of(query, scale)), vectors
    )


@dataclass(frozen=True, slots=True)
class _ByMask:
    """A call whose blocks follow from vectors."""

    split: Split
    mask: str
    scale: float

    def attend(self, ranks: Ranks, step: int, total: Sum, q: Tensor, k: Tensor, v: Tensor, *vectors: Tensor) -> None:
        out, lse = ATTEND(q, k, v, self._vectors(ranks, step, vectors), self.mask, self.scale)
        total.merge((0, q.shape[-2]), out, lse)

    def gradients(self, ranks: Ranks, step: int, sums: Gradients, given: tuple[Tensor, ...], *vectors: Tensor) -> None:
        grad, q, k, v, out, lse = given
        here = self._vectors(ranks, step, vectors)
        dq, dk, dv = ATTEND_BACKWARD(grad, q, k, v, here, out, lse, self.mask, self.scale)
        sums.q_BHSD += dq
        sums.k_BGTD += dk
        sums.v_BGTD += dv

    def _vectors(self, ranks: Ranks, step: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the queries and keys that are here."""
        here, unmoved = self.split.keys_at(ranks, step), self.split.keys_unmoved(ranks)
        return [_of(x, here, unmoved) if of_keys(x) else x for x in vectors]


def _of(vector: Tensor, pieces: Sequence[Piece], unmoved: Sequence[Piece]) -> Tensor:
    """The elements of some keys."""
    if tuple(pieces) == tuple(unmoved):
        return vector
    around = [next(u for u in unmoved if u.first <= each.first and each.end <= u.end) for each in pieces]
    places = [u.places(each.first, each.end) for each, u in zip(pieces, around, strict=True)]
    return torch.cat([vector[..., slice(*each)] for each in places], -1)
