"""Attention masks as expressions in vectors of queries and of keys: windows, documents, padding, distances.

From a mask back, calls work on every element alone (`le`, `bitwise_and`, `where` …), or repeat elements (`expand`),
up to tensors that have no dim of queries, or none of keys: positions, numbers of documents, what is padding. The calls
become the text of an expression, those tensors its vectors, and the attention an `attention_by_mask`, so that the mask
is never made. Where it is not so made (an input, a buffer, a learned bias), needs a gradient, or hides keys by large
finite numbers where a query may see none, the call stays as it is: such a row would be the mean of all values, in which
PyTorch's kernels differ. So do small masks: made once, they serve all layers, and no GPU waits for a table of blocks.

The causal mask, however it is made and of any size, becomes `is_causal`: PyTorch's fastest kernels take that, no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.masks.causal import is_causal
from autopar.capture.masks.hiding import hiding_of
from autopar.capture.masks.lowest import all_see_themselves, hidden_by_infinity
from autopar.capture.masks.reach import reach_of
from autopar.capture.masks.reading import NotByPositionError, Reading
from autopar.capture.masks.seen import share_seen
from autopar.capture.masks.shared_heads import without_repeats
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, set_call, shape_of, value_of
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK

ATTENTION = aten.scaled_dot_product_attention.default
SMALL = 2**24
"""Elements of a mask that is made: those of 4,096 positions of one text."""


def masks_by_position(draft: TracedGraph) -> None:
    """Let attention work out masks block by block where they are made of vectors, and need none where it is causal."""
    found: dict[fx.Node, _Mask | None] = {}
    for node in draft.calls(ATTENTION):
        given = arguments(node)
        mask = given["attn_mask"]
        if mask is None or not _is_supported(given):
            continue
        if mask not in found:
            found[mask] = _mask_of(draft, mask)
        made = found[mask]
        if made is None:
            continue
        if made.causal:
            _let_be_causal(node, given)
        elif value_of(mask).numel() > SMALL:
            with draft.graph.inserting_before(node):
                draft.replace(node, _by_mask(draft, node, given, made))


def _is_supported(given: dict[str, Any]) -> bool:
    """Return whether the mask operators support the call, and its mask has a dim of queries and one of keys."""
    query, key, value, mask = (value_of(given[name]) for name in ("query", "key", "value", "attn_mask"))
    whole = query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    square = mask.ndim > 1 and mask.shape[-2:] == (query.shape[-2], key.shape[-2]) and min(mask.shape[-2:]) > 1
    added = mask.dtype in (torch.bool, query.dtype)
    heads = query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1]
    return whole and square and added and heads and not given["is_causal"] and not mask.requires_grad


@dataclass(frozen=True, slots=True)
class _Mask:
    text: str
    vectors: list[fx.Node]
    causal: bool
    seen: float = 1.0
    rising: bool = False
    reach: int | None = None


def _mask_of(draft: TracedGraph, mask: fx.Node) -> _Mask | None:
    hiding = hiding_of(mask) if value_of(mask).is_floating_point() else "infinity"
    if hiding == "other":
        return None
    reading, sizes = Reading(draft), shape_of(mask)[-2:]
    with draft.graph.inserting_before(mask):
        try:
            found = reading.of(mask)
        except NotByPositionError:
            return None
    square = sizes[0] == sizes[1]
    if hiding == "lowest":
        if not square or not all_see_themselves(found, reading):
            return None
        found = hidden_by_infinity(found)
    causal = square and is_causal(found, reading.vectors, sizes[0])
    text = str(found)
    if causal or value_of(mask).numel() <= SMALL:
        return _Mask(text, reading.vectors, causal)
    seen, rising = share_seen(text, reading.vectors, *sizes)
    return _Mask(text, reading.vectors, causal, seen, rising, reach_of(text, reading.vectors, *sizes))


def _let_be_causal(node: fx.Node, given: dict[str, Any]) -> None:
    """Let a call that has the causal mask say so, and have none."""
    key, value = without_repeats(given["key"], given["value"])
    shared = given["enable_gqa"] or shape_of(key)[1] != shape_of(given["query"])[1]
    call = given["query"], key, value, None, given["dropout_p"], True
    set_call(node, ATTENTION, *call, scale=given["scale"], enable_gqa=shared)


def _by_mask(draft: TracedGraph, node: fx.Node, given: dict[str, Any], made: _Mask) -> fx.Node:
    """Return the attention of a call under a mask that is worked out block by block."""
    tensors = (given["query"], *without_repeats(given["key"], given["value"]))
    further = {"scale": given["scale"], "seen": made.seen, "rising": made.rising, "reach": made.reach}
    if given["dropout_p"]:
        further["dropout_p"] = given["dropout_p"]
    call = (*tensors, made.vectors, made.text)
    return draft.call(ATTENTION_BY_MASK, *call, module=node.meta["module"], **further)
