"""The bytes of a plan at one moment."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.memory.lifetimes import ends_of
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.resident_parts import bytes_in


def at_moment(memory: MemoryModel, choices: Sequence[int], moment: int) -> int:
    """Bytes at a moment, as the rows of the problem count them."""
    row = MemoryRow(((moment, 1),))
    found = ((place, bytes_in(memory, place, row)) for place in (*range(len(choices)), *memory.space.edges))
    return sum(int(a[0][tuple(choices[end] for end in ends_of(place))]) for place, a in found if a is not None)
