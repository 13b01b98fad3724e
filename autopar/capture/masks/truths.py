"""Masks of numbers that hide keys and do nothing else become masks of truth values, under which keys can be divided.

That is known of constants: the numbers are 0, or -inf or the lowest finite ones, and every query sees a key.
"""

from __future__ import annotations

from torch import Tensor, fx

from autopar.capture.masks.hiding import LOWEST
from autopar.capture.masks.seen import constant
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, value_of

ATTENTION = aten.scaled_dot_product_attention.default
MASK = [each.name for each in ATTENTION._schema.arguments].index("attn_mask")


def masks_of_truth_values(draft: TracedGraph) -> None:
    """Let attention have truth values in place of numbers that hide."""
    known: dict[fx.Node, Tensor | None] = {}
    made: dict[fx.Node, fx.Node] = {}
    for node in draft.calls(ATTENTION):
        mask = arguments(node)["attn_mask"]
        if mask is None or not value_of(mask).is_floating_point() or value_of(mask).requires_grad:
            continue
        value = constant(mask, known)
        if value is None or not _only_hides(value):
            continue
        if mask not in made:
            with draft.graph.inserting_before(node):
                made[mask] = draft.call(aten.gt.Scalar, mask, LOWEST)
        if "attn_mask" in node.kwargs:
            node.update_kwarg("attn_mask", made[mask])
        else:
            node.update_arg(MASK, made[mask])


def _only_hides(mask: Tensor) -> bool:
    seen = mask == 0
    return bool((seen | (mask < LOWEST)).all() and seen.any(-1).all())
