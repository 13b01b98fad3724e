"""Keys that each rank receives, hop by hop, if ranks split queries and keys alike.

Around a ring of n ranks all keys come to all of them, in n - 1 hops. If queries see a window of what lies before them,
keys that nobody sees stay on their rank. With positions in order only the last keys of the parts before a rank's own
come. If zigzag-sharded, each rank has an early chunk and a late one. It receives the last keys of the chunk before its
early one, from the rank before it, and those of the chunk before its late one, from the next rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hop:
    """Keys that come to every rank, from the one so many before it."""

    source: int
    first: int
    """The place of the first of them among that rank's keys."""
    size: int
    relayed: bool = False
    """True if the rank before passes the keys on, having received them, or more of them, in the hop before."""


def hops_of(reach: int | None, part: int, num_parts: int, zigzag: bool) -> tuple[Hop, ...]:
    """Return the hops of `num_parts` ranks with `part` keys each, where queries see `reach` positions back and none
    ahead.

    None: they may see any. If zigzag-sharded, a window that is larger than a chunk is taken for that.

    >>> [(hop.source, hop.first, hop.size) for hop in hops_of(6, 4, 8, zigzag=False)]
    [(1, 0, 4), (2, 2, 2)]
    >>> [(hop.source, hop.first, hop.size) for hop in hops_of(3, 8, 4, zigzag=True)]
    [(1, 1, 3), (-1, 5, 3)]
    """
    if reach is None or (zigzag and reach > part // 2):
        return tuple(Hop(source, 0, part, relayed=source > 1) for source in range(1, num_parts))
    if zigzag and num_parts > 1 and reach:
        return Hop(1, part // 2 - reach, reach), Hop(-1, part - reach, reach)
    sizes = [min(part, reach - begun) for begun in range(0, min(reach, (num_parts - 1) * part), part)]
    return tuple(Hop(before + 1, part - size, size, relayed=before > 0) for before, size in enumerate(sizes))


def chains_of(hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """Return for each hop the one in which its keys left their own rank.

    Gradients that travel home are those of all keys that left together.
    """
    found: list[Hop] = []
    for hop in hops:
        found.append(found[-1] if hop.relayed else hop)
    return tuple(found)
