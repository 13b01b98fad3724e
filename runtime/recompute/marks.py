"""What the mode of its segment means for each call of a per-rank graph, as the rewriter writes it down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.program.recompute_segments import OFFLOAD

MARK = "autopar_mode"
"""The key of `Mark` in a call's meta; "recompute" is one of PyTorch's own, which torch.compile prints."""
CHANGED = "changed"
"""The key in a placeholder's meta that says whether calls change it in place: running statistics."""
SEGMENT = "segment"
"""The key of the segment, "" for none, in a call's meta; absent on what moves tensors and weights to calls."""
LEAVES = "leaves"
"""The key that is true on what gives a tensor that may leave for the host, where a segment saves it."""
OF_OUTPUTS = "leaves_of_outputs"
"""The key of the same for each output of a call of a whole layer, of which what it makes besides may leave, too."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What the mode of its segment means for a call of a per-rank graph."""

    segment: str
    mode: str
    kept: bool
    """Whether the call never runs again: the mode saves its result."""
    weight: bool = False
    """Whether the call casts a parameter, perhaps long before its segment runs: it is computed again on its own."""


def role_of(node: fx.Node) -> Mark | None:
    """The role of a call; None where it belongs to no segment that is computed again, or sends what it saves away."""
    return node.meta.get(MARK)


def is_offloaded(node: fx.Node) -> bool:
    """Whether what a call saves for its backward leaves for the host."""
    role = role_of(node)
    return role is not None and role.mode == OFFLOAD
