"""Masks that let each query see the keys up to its own, and no others: attention has a kernel for them, and no mask.

A mask is such a one where all that it is made of is known without data: blocks off its diagonal mostly by the bounds of
its vectors, those on it element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from autopar.capture.masks.seen import constants
from autopar.program.operators.attention.by_mask import part_of
from autopar.program.operators.attention.dropout import Range
from autopar.program.operators.attention.expressions import Expression, evaluate
from autopar.program.operators.attention.masked_blocks import block_size, bounds_of, known_of, places

MOST = 4
"""Blocks that are looked at element by element, for each row of blocks: no causal mask needs more than one."""


def is_causal(mask: Expression, vectors: Sequence[fx.Node], size: int) -> bool:
    """Whether a mask of so many queries and keys is the causal one, whatever the data."""
    given = constants(vectors)
    if given is None:
        return False
    step = block_size(size)
    blocks = places(size, step)
    hidden, seen = known_of(mask, [bounds_of(x, step, step) for x in given], len(blocks), len(blocks))
    left = ~torch.where(torch.ones_like(hidden).triu(1), hidden, seen)
    left.fill_diagonal_(True)  # a block there is neither hidden nor seen
    return int(left.sum()) <= MOST * len(blocks) and all(
        _is_causal_in(mask, given, blocks[i], blocks[j]) for i, j in left.nonzero().tolist()
    )


def _is_causal_in(mask: Expression, vectors: Sequence[Tensor], queries: Range, keys: Range) -> bool:
    found = evaluate(mask, [part_of(x, queries, keys) for x in vectors])
    seen, hidden = (found, ~found) if found.dtype is torch.bool else (found == 0, found == -math.inf)
    rows, columns = (torch.arange(*each, device=found.device) for each in (queries, keys))
    expected = rows.unsqueeze(1) >= columns
    return bool(((seen == expected) & (hidden != expected)).all())
