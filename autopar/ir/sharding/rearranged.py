"""Rearranging a tensor on the device for a collective, before the message or behind it.

A collective moves one rank's part after the other, [n, *part]. That is how the whole lies in memory, in row-major
order, if all dims in front of the divided one have size 1 and ranks have blocks of it in order. Otherwise the device
reads and writes the whole once more: before a reduce-scatter, behind an all-gather, and on either side of an
all-to-all. The collectives of `runtime.collectives` copy where this says so, and `costs.pricing.moves` prices it.
"""

from __future__ import annotations

from collections.abc import Sequence

READ_AND_WRITTEN = 2
"""Times that a copy goes through the bytes of a tensor."""


def is_rearranged(shape: Sequence[int], dim: int, zigzag: bool = False) -> bool:
    """Return True if the parts of ranks along `dim`, one after the other, are not the whole as it lies in memory.

    >>> is_rearranged((1, 4096, 8192), 1), is_rearranged((2, 4096, 8192), 1), is_rearranged((4096, 8192), 0)
    (False, True, False)
    """
    return zigzag or any(size != 1 for size in shape[:dim])
