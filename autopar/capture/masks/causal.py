"""Masks that let each query see the keys up to its own, or the last ones of them, and no others: kernels need no mask.

A mask is such a one where all that it is made of is known without data: most blocks by the bounds of its vectors, those
at an edge element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from autopar.capture.masks.seen import constants
from autopar.ir.program.operators.attention.dropout import Range
from autopar.ir.program.operators.attention.expressions import Expression, evaluate, part_of
from autopar.ir.program.operators.attention.masked_blocks import block_size, bounds_of, known_of, places

MOST = 4
"""Blocks that are looked at element by element, for each row of blocks: no causal mask needs more than three."""


def is_causal(mask: Expression, vectors: Sequence[fx.Node], size: int, window: int | None = None) -> bool:
    """Return whether a mask of `size` queries and keys is the causal one, whatever the data.

    With a window: the one that lets each query see so many keys up to its own.
    """
    window = size if window is None else window
    given = constants(vectors)
    if given is None:
        return False
    step = block_size(size)
    blocks = places(size, step)
    hidden, seen = known_of(mask, [bounds_of(x, step, step) for x in given], len(blocks), len(blocks))
    begins, ends = (torch.tensor(each) for each in zip(*blocks, strict=True))
    nearest = begins.unsqueeze(1) - (ends - 1)
    farthest = (ends - 1).unsqueeze(1) - begins
    hides, shows = (farthest < 0) | (nearest >= window), (nearest >= 0) & (farthest < window)
    left = ~((hides & hidden) | (shows & seen))
    return int(left.sum()) <= MOST * len(blocks) and all(
        _is_causal_in(mask, given, blocks[i], blocks[j], window) for i, j in left.nonzero().tolist()
    )


def _is_causal_in(mask: Expression, vectors: Sequence[Tensor], queries: Range, keys: Range, window: int) -> bool:
    found = evaluate(mask, [part_of(x, queries, keys) for x in vectors])
    seen, hidden = (found, ~found) if found.dtype is torch.bool else (found == 0, found == -math.inf)
    rows, columns = (torch.arange(*each, device=found.device) for each in (queries, keys))
    back = rows.unsqueeze(1) - columns
    expected = (back >= 0) & (back < window)
    return bool(((seen == expected) & (hidden != expected)).all())
