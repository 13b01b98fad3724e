"""Which blocks of scores there are between the positions of some queries and of some keys, and their sum.

A rank's queries are a few pieces of consecutive positions, one where a dim is split in order, two by zigzag, and so
are keys. Where no query sees what comes behind it, a piece of queries with a piece of keys is up to three blocks:

    keys before the queries     all are seen
    the same positions          a triangle, which the kernels know
    keys behind the queries     none is seen: not computed

Results of blocks are merged by the log-sum-exp of their scores (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.runtime.implementations.attention.kernels import Block, attend, attend_backward

Range = tuple[int, int]
"""First place, and the place behind the last one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive positions, and where they lie in a rank's tensor."""

    first: int
    """The first position."""
    at: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size

    def places(self, first: int, end: int) -> Range:
        """Where the positions from `first` up to `end` lie."""
        return self.at + first - self.first, self.at + end - self.first


@dataclass(frozen=True, slots=True)
class Pair:
    """The places of queries and keys that make a block."""

    queries: Range
    keys: Range
    columns: Range
    """The places of the keys in a mask, where there is one."""
    causal: bool = False


def pairs_of(
    queries: Sequence[Piece], keys: Sequence[Piece], columns: Sequence[Piece], causal: bool
) -> tuple[Pair, ...]:
    """The blocks of some pieces, of which none is empty; `columns` are the positions of a mask's keys.

    Causal calls have no mask; where queries and keys are the same positions, in order, all of them are one block.
    """
    if causal and tuple(queries) == tuple(keys):
        whole = 0, sum(piece.size for piece in queries)
        return (Pair(whole, whole, whole, causal=True),)
    found = [pair for q in queries for k in keys for pair in _pairs(q, k, _around(k, columns), causal)]
    return tuple(_joined(found)) if causal else tuple(found)


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """Blocks of causal calls that lie beside each other as one: fewer, larger calls of a kernel."""
    found: list[Pair] = []
    for pair in pairs:
        for place, other in enumerate(found):
            if pair.causal or other.causal:
                continue
            if pair.queries == other.queries and other.keys[1] == pair.keys[0]:
                found[place] = replace(other, keys=(other.keys[0], pair.keys[1]))
                break
            if pair.keys == other.keys and other.queries[1] == pair.queries[0]:
                found[place] = replace(other, queries=(other.queries[0], pair.queries[1]))
                break
        else:
            found.append(pair)
    return found


def _around(piece: Piece, pieces: Sequence[Piece]) -> Piece:
    return next(each for each in pieces if each.first <= piece.first and piece.end <= each.end)


def _pairs(q: Piece, k: Piece, columns: Piece, causal: bool) -> list[Pair]:
    def pair(queries: Range, keys: Range, triangle: bool = False) -> Pair:
        return Pair(q.places(*queries), k.places(*keys), columns.places(*keys), triangle)

    whole, before = (q.first, q.end), min(k.end, q.first)
    if not causal:
        return [pair(whole, (k.first, k.end))]
    found = [pair(whole, (k.first, before))] if k.first < before else []
    begin, end = max(q.first, k.first), min(q.end, k.end)
    if begin < end:
        found.append(pair((begin, end), (begin, end), triangle=True))
        if end < q.end:
            found.append(pair((end, q.end), (begin, end)))
    return found


@dataclass(slots=True)
class Sum:
    """The result of the blocks so far, in float32 at least, with the log-sum-exp of their scores."""

    out_BHSD: Tensor
    lse_BHS: Tensor

    @classmethod
    def empty(cls, q_BHSD: Tensor, v_BGTD: Tensor) -> Sum:
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        out = q_BHSD.new_zeros((*q_BHSD.shape[:-1], v_BGTD.shape[-1]), dtype=wide)
        return cls(out, q_BHSD.new_full(q_BHSD.shape[:-1], -math.inf, dtype=wide))

    def add(self, pairs: Sequence[Pair], q: Tensor, k: Tensor, v: Tensor, block: Block) -> None:
        """Attend by some blocks more."""
        for each in pairs:
            mine = slice(*each.queries)
            out, lse = attend(q[:, :, mine], *_keys(each, k, v), _block(each, block))
            self._merge(mine, out, lse)

    def _merge(self, mine: slice, out: Tensor, lse: Tensor) -> None:
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
        pairs: Sequence[Pair],
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
    ) -> None:
        """The part of some blocks more."""
        for each in pairs:
            mine, theirs = slice(*each.queries), slice(*each.keys)
            rows = [x[:, :, mine] for x in (grad, q, out)]
            lse_of_rows = lse[:, :, mine].contiguous()  # kernels of a GPU read it as if it were
            dq, dk, dv = attend_backward(
                rows[0], rows[1], *_keys(each, k, v), rows[2], lse_of_rows, _block(each, block)
            )
            self.q_BHSD[:, :, mine] += dq
            self.k_BGTD[:, :, theirs] += dk
            self.v_BGTD[:, :, theirs] += dv


def _keys(pair: Pair, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    theirs = slice(*pair.keys)
    return k[:, :, theirs], v[:, :, theirs]


def _block(pair: Pair, block: Block) -> Block:
    """What the pair computes, with its part of the mask."""
    mask = block.mask_BHST
    if mask is not None:
        rows = mask if mask.shape[-2] == 1 else mask[..., slice(*pair.queries), :]
        mask = rows if mask.shape[-1] == 1 else rows[..., slice(*pair.columns)]
    return replace(block, causal=pair.causal, mask_BHST=mask)
