"""Bounds from the seconds of one stage on those of stages with blocks of the same kinds, or more blocks.

A plan of a stage, restricted to some of its blocks, is a plan of these. Suppose that blocks within the memory limit
take some seconds more than without it. Then any stage with blocks of these kinds, and with as many micro-batches in
flight or more, takes at least as many seconds more. Layers repeat, so a few stages bound nearly all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planning.pipeline.stages.cheapest_cut import Floats


def raise_alike(
    table: Floats, least: Floats, more: float, span: tuple[int, int], kinds: Sequence[int], stages: Sequence[int]
) -> None:
    """Raise a table [stage, first block, end block] to `least` and so many seconds, wherever that holds.

    That is in the given stages, with blocks among which some in a row are of the kinds of those from `span`'s first to
    its end. Infinite seconds say that these blocks do not fit.
    """
    has = _spans_with(span, kinds)
    for stage in stages:
        table[stage][has] = np.maximum(table[stage][has], least[stage][has] + more)


def _spans_with(span: tuple[int, int], kinds: Sequence[int]) -> np.ndarray:
    """Return [first block, end block]: True if blocks of the kinds of a span lie between them, in order."""
    first, end = span
    num_blocks, length, wanted = len(kinds), end - first, tuple(kinds[first:end])
    next_start = np.full(num_blocks + 1, 2 * num_blocks)
    for start in reversed(range(num_blocks)):
        alike = tuple(kinds[start : start + length]) == wanted
        next_start[start] = start if alike else next_start[start + 1]
    return next_start[:, None] + length <= np.arange(num_blocks + 1)[None, :]
