"""Marks on the calls of a per-rank graph: the effect of their segment's recompute mode, as the rewriter notes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.errors import PlanError
from autopar.ir.program.program import Program
from autopar.ir.program.recompute_segments import MODES, OFFLOAD, segments_of

MARK = "autopar_mode"
"""The key of `Mark` in a call's meta; "recompute" is one of PyTorch's own, which torch.compile prints."""
CHANGED = "changed"
"""The key in a placeholder's meta that says whether calls change it in place: running statistics."""
SEGMENT = "segment"
"""The key of the segment, "" for none, in a call's meta; absent on what moves tensors and weights to calls."""
OFFLOADABLE = "offloadable"
"""The key that is true on what gives a tensor that may leave for the host, where a segment saves it."""
OF_OUTPUTS = "leaves_of_outputs"
"""The key of the same for each output of a call of a whole layer, of which what it makes besides may leave, too."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Effect of a segment's recompute mode on a call of a per-rank graph."""

    segment: str
    mode: str
    saved: bool
    """True if the call never runs again: the mode saves its result."""
    weight: bool = False
    """True if the call casts a parameter, perhaps long before its segment runs; it is recomputed on its own."""


def role_of(node: fx.Node) -> Mark | None:
    """Return the role of a call; None where it belongs to no segment that is computed again, or sends what it saves
    away.
    """
    return node.meta.get(MARK)


def is_offloaded(node: fx.Node) -> bool:
    """Return whether a call's saved tensors are offloaded to the host."""
    role = role_of(node)
    return role is not None and role.mode == OFFLOAD


def modes_of_calls(program: Program, recompute: Mapping[str, str]) -> dict[fx.Node, tuple[str, str]]:
    """Return the segment and mode of every call whose segment has a mode other than none.

    Raises PlanError if the program has no such segment, or recomputation no such mode.
    """
    segments = {segment.name: segment for segment in segments_of(program)}
    found: dict[fx.Node, tuple[str, str]] = {}
    for name, mode in recompute.items():
        if name not in segments or mode not in MODES:
            raise PlanError(
                f'recompute says "{mode}" for segment "{name}"; the program has segments '
                f"{', '.join(segments) or 'none'}, and modes are {', '.join(MODES)}. Plan the model anew."
            )
        if mode != "none":
            found.update(dict.fromkeys(segments[name].nodes, (name, mode)))
    return found
