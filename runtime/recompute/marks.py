"""What recomputation does with each call of a per-rank graph, as the rewriter writes it down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

MARK = "recompute"
"""The key of `Mark` in a call's meta."""
CHANGED = "changed"
"""The key in a placeholder's meta that says whether calls change it in place: running statistics."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What recomputation does with a call of a per-rank graph."""

    segment: str
    mode: str
    kept: bool
    """Whether the call never runs again: it communicates, or the mode keeps its result."""
    weight: bool = False
    """Whether the call casts a parameter, perhaps long before its segment runs: it is computed again on its own."""


def role_of(node: fx.Node) -> Mark | None:
    """The role of a call; None where it belongs to no segment that is computed again."""
    return node.meta.get(MARK)
