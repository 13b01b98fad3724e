"""How far back queries see under a mask, as far as that follows from positions and not from data: a window's size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from autopar.capture.masks.seen import bounds_without_data, constant
from autopar.capture.passes.traced_graph import value_of
from autopar.program.operators.attention.by_mask import part_of_vector
from autopar.program.operators.attention.expressions import Expression, parse
from autopar.program.operators.attention.masked_blocks import known_of, places
from autopar.program.operators.attention.sums import Range

NUM_BLOCKS = 512
"""Of queries, and of keys; of blocks that may be farthest from the diagonal every score is looked at."""


def reach_of(text: str, vectors: Sequence[fx.Node], num_queries: int, num_keys: int) -> int | None:
    """The most positions that a query may see back; None where the last ones see the first, or some what is ahead."""
    if num_queries != num_keys:
        return None
    known: dict[fx.Node, Tensor | None] = {}
    mask = _Mask(parse(text), [(constant(node, known), value_of(node)) for node in vectors])
    size = -(-num_keys // NUM_BLOCKS)
    blocks = places(num_keys, size)
    seen = mask.seen_in_blocks(size, len(blocks))
    if seen[-1, 0] or seen.triu(1).any() or any(mask.seen_in(each, each).triu(1).any() for each in blocks):
        return None
    reach = 0
    for row, queries in enumerate(blocks):
        for column in seen[row].nonzero().flatten().tolist():
            keys = blocks[column]
            if queries[1] - 1 - keys[0] <= reach:
                break
            query, key = mask.seen_in(queries, keys).nonzero().unbind(1)
            reach = max([reach, *(query - key + queries[0] - keys[0]).tolist()])
    return reach


class _Mask:
    def __init__(self, expression: Expression, vectors: Sequence[tuple[Tensor | None, Tensor]]) -> None:
        self.expression = expression
        self.vectors = vectors
        """Of each its values, where these do not depend on data, and what it looks like."""

    def seen_in_blocks(self, size: int, count: int) -> Tensor:
        """Which blocks of so many queries and keys may be seen."""
        bounds = [bounds_without_data(x, like, size, size) for x, like in self.vectors]
        return self._seen(bounds, count, count)

    def seen_in(self, queries: Range, keys: Range) -> Tensor:
        """Which scores of one block may be seen."""
        parts = [(x if x is None else part_of_vector(x, queries, keys), like) for x, like in self.vectors]
        bounds = [bounds_without_data(x, like, 1, 1) for x, like in parts]
        return self._seen(bounds, queries[1] - queries[0], keys[1] - keys[0])

    def _seen(self, bounds: Sequence[tuple[Tensor, Tensor]], num_queries: int, num_keys: int) -> Tensor:
        hidden, _ = known_of(self.expression, bounds, [(0, 0)] * num_queries, [(0, 0)] * num_keys)
        return ~torch.as_tensor(hidden)
