"""Blocks of scores between the positions of some queries and of some keys.

A rank's queries are a few chunks of consecutive positions: one if a dim is split in order, two if it is zigzag-sharded.
The same holds for keys. If no query sees later positions, a chunk of queries with a chunk of keys makes up to three
blocks:

    keys before the queries     all are seen
    the same positions          a triangle, which the kernels know
    keys behind the queries     none is seen: not computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from autopar.ir.program.operators.attention.dropout import Range
from autopar.ir.program.operators.attention.kernels import Block, attend, attend_backward
from autopar.ir.program.operators.attention.sums import Gradients, Sum
from autopar.ir.program.operators.attention.tiles import attend_in_tiles, gradients_in_tiles


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
        """Return the range in the rank's tensor of the positions from `first` up to `end`."""
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
    """Return the blocks of some chunks, of which none is empty; `columns` are the positions of a mask's keys.

    Causal calls have no mask; where queries and keys are the same positions, in order, all of them are one block.
    """
    if causal and tuple(queries) == tuple(keys):
        whole = 0, sum(piece.size for piece in queries)
        return (Pair(whole, whole, whole, causal=True),)
    found = [pair for q in queries for k in keys for pair in _pairs(q, k, _piece_within(k, columns), causal)]
    return tuple(_joined(found)) if causal else tuple(found)


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """Return blocks of causal calls with adjacent ones merged: fewer, larger calls of a kernel."""
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


def _piece_within(piece: Piece, pieces: Sequence[Piece]) -> Piece:
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


def add_blocks(total: Sum, pairs: Sequence[Pair], q: Tensor, k: Tensor, v: Tensor, block: Block) -> None:
    """Attend by some blocks more."""
    way = attend if block.dropout is None else attend_in_tiles
    for each in pairs:
        total.add(each.queries, each.keys, q, k, v, _part(each, block), way)


def add_gradients(sums: Gradients, pairs: Sequence[Pair], grad: Tensor, *given: Tensor, block: Block) -> None:
    """Add the part of some blocks; `given` are queries, keys, values, and result and log-sum-exp of whole rows."""
    way = attend_backward if block.dropout is None else gradients_in_tiles
    for each in pairs:
        sums.add(each.queries, each.keys, grad, *given, block=_part(each, block), way=way)  # type: ignore[misc]


def _part(pair: Pair, block: Block) -> Block:
    return block.part(pair.queries, pair.keys, pair.columns, pair.causal)
