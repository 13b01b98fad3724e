"""The least or the largest size that works, found with few tries: powers of two first, then bisected between them.

Both assume that whether a size works changes once, from the least size to the largest. A size is tried once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

GRAIN = 8
"""A largest size is found to 1 part in so many."""


def least_size(
    coarse: Iterable[int], between: Callable[[int, int], Sequence[int]], works: Callable[[int], bool]
) -> int | None:
    """Return the least size that works: the first of the coarse ones, or one between it and the one before.

    Args:
        coarse: Sizes to try first, ascending.
        between: Returns the sizes above one and below another, ascending.
        works: Tries a size.

    >>> least_size([1, 2, 4, 8, 16], lambda low, high: range(low + 1, high), lambda size: size >= 6)
    6
    """
    below = 0
    for size in coarse:
        if works(size):
            break
        below = size
    else:
        return None
    left = list(between(below, size))
    while left:
        middle = len(left) // 2
        if works(left[middle]):
            size, left = left[middle], left[:middle]
        else:
            left = left[middle + 1 :]
    return size


def largest_size(start: int, most: int, works: Callable[[int], bool]) -> int | None:
    """Return the largest size that works, up to `most`: doubled or halved from the start, then bisected to its grain.

    >>> largest_size(4, 1000, lambda size: size <= 29)
    28
    """
    size = start
    while not works(size):
        if size == 1:
            return None
        size //= 2
    if size == start:
        while 2 * size <= most and works(2 * size):
            size *= 2
        if 2 * size > most:
            return size
    grain = max(size // GRAIN, 1)
    left = list(range(size + grain, 2 * size, grain))
    while left:
        middle = len(left) // 2
        if works(left[middle]):
            size, left = left[middle], left[middle + 1 :]
        else:
            left = left[:middle]
    return size
