"""The bytes of a plan at one moment."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.resident_parts import edge_bytes, node_bytes


def at_moment(memory: MemoryModel, choices: Sequence[int], moment: int) -> int:
    """Bytes at a moment, as the rows of the problem count them."""
    row = MemoryRow(((moment, 1),))
    nodes = sum(int(node_bytes(memory, n, row)[0][choice]) for n, choice in enumerate(choices))
    edges = ((w, edge_bytes(memory, w, row)) for w in memory.space.edges)
    return nodes + sum(int(a[0][choices[w.source], choices[w.target]]) for w, a in edges if a is not None)
