"""Attention with sinks that a model writes out (GPT-OSS): one call, which makes no scores.

    scores  = query @ keyᵀ · scale + mask
    joined  = cat([scores, sinks], -1)                        sinks: a number of each head, one more key without a value
    weights = softmax(joined - max(joined), -1)[..., :-1]
    y       = dropout(weights) @ value

becomes `attention_by_mask(query, key, value, vectors, mask, scale, sinks=sinks)`, where the mask is made of vectors, as
`rewrite` says. A query that sees no key gives all weight to its sink, by the lowest finite numbers as by -inf. Where
the mask is causal, or lets queries see a window, the call says so, and kernels that know windows take no mask.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.masks.causal import is_causal
from autopar.capture.masks.hiding import hiding_of
from autopar.capture.masks.lowest import hidden_by_infinity
from autopar.capture.masks.reach import reach_of
from autopar.capture.masks.reading import NotByPositionError, Reading
from autopar.capture.masks.seen import share_seen
from autopar.capture.masks.shared_heads import without_repeats
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of, value_of
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.expressions import Call


def attention_with_sinks(draft: TracedGraph) -> None:
    """Let attention that writes out its scores and sinks be one call."""
    masks: dict[fx.Node, dict[str, Any] | None] = {}
    for node in draft.calls(aten.matmul.default):
        try:
            found = _written_out(node)
        except _OtherwiseError:
            continue
        if found.mask not in masks:
            masks[found.mask] = _mask_of(draft, found.mask, value_of(found.query).dtype)
        mask = masks[found.mask]
        if mask is None:
            continue
        key, value = without_repeats(found.key, found.value)
        further = {"scale": found.scale, "dropout_p": found.dropout_p, "sinks": found.sinks}
        positional = {name: each for name, each in mask.items() if name in ("vectors", "mask")}
        named = {name: each for name, each in mask.items() if name not in positional}
        with draft.graph.inserting_before(node):
            call = found.query, key, value, *positional.values()
            new = draft.call(ATTENTION_BY_MASK, *call, module=node.meta["module"], **named, **further)
        draft.replace(node, new)


class _OtherwiseError(Exception):
    """The call is not what an attention with sinks has in its place."""


@dataclass(frozen=True, slots=True)
class _WrittenOut:
    """An attention with sinks, as it was found."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node
    """Added to the scores."""
    sinks: fx.Node
    """[1, heads, 1, 1]."""
    scale: float
    dropout_p: float


def _written_out(node: fx.Node) -> _WrittenOut:
    """Return the attention whose result a product gives; _OtherwiseError if it is none."""
    weights, value = node.args[:2]
    dropout_p = 0.0
    weights = _uncast(weights)
    if weights.target is aten.dropout.default:
        dropping = arguments(weights)
        weights, dropout_p = dropping["input"], dropping["p"] if dropping["train"] else 0.0
    kept = _call(weights, aten.slice.Tensor)
    softmax = _call(kept["self"], aten.softmax.int)
    joined = _without_level(softmax["self"])
    parts = _call(joined, aten.cat.default)
    scores, sinks = parts["tensors"] if len(parts["tensors"]) == 2 else (None, None)
    total = _call(scores, aten.add.Tensor)
    product, scale = _scaled(total["self"])
    query, turned = _call(product, aten.matmul.default).values()
    transposed = _call(turned, aten.transpose.int)
    found = _WrittenOut(
        query, transposed["self"], _tensor(value), _tensor(total["other"]), _of_heads(sinks), scale, dropout_p
    )
    last = {kept["dim"], softmax["dim"], parts["dim"]} <= {-1, 3} and kept["step"] == 1 and not kept["start"]
    turns = {transposed["dim0"] % 4, transposed["dim1"] % 4} == {2, 3} and total["alpha"] == 1
    keys = shape_of(_tensor(scores))[-1]
    one_more = shape_of(weights)[-1] == keys and shape_of(joined)[-1] == keys + 1
    if not last or not turns or not one_more or not _is_supported(found):
        raise _OtherwiseError
    return found


def _is_supported(found: _WrittenOut) -> bool:
    """Return whether the operator takes the tensors, and the mask has a dim of queries and as large a one of keys."""
    query, key, value, mask = map(value_of, (found.query, found.key, found.value, found.mask))
    if any(x.ndim != 4 for x in (query, key, value)) or query.dtype != key.dtype or key.dtype != value.dtype:
        return False
    whole = key.shape[:3] == value.shape[:3] == query.shape[:3] and query.shape[-1] == key.shape[-1]
    square = mask.ndim > 1 and mask.shape[-2:] == (query.shape[-2], key.shape[-2]) and query.shape[-2] > 1
    return whole and square and not mask.requires_grad and shape_of(found.sinks)[1] in (1, query.shape[1])


def _tensor(argument: object) -> fx.Node:
    if not isinstance(argument, fx.Node) or not isinstance(argument.meta["val"], Tensor):
        raise _OtherwiseError
    return argument


def _call(argument: object, target: torch._ops.OpOverload) -> dict[str, Any]:
    node = _tensor(argument)
    if node.target is not target:
        raise _OtherwiseError
    return arguments(node)


def _uncast(argument: object) -> fx.Node:
    node = _tensor(argument)
    return _tensor(node.args[0]) if node.target is aten.to.dtype else node


def _without_level(argument: object) -> fx.Node:
    """Return the scores from which their largest one is taken before a softmax, which that leaves as it is."""
    node = _uncast(argument)
    if node.target is not aten.sub.Tensor:
        return node
    scores, level = _tensor(node.args[0]), _tensor(node.args[1])
    largest: Any = level.args[0] if level.target is operator.getitem and level.args[1] == 0 else level
    of_scores = largest.target in (aten.max.dim, aten.amax.default) and largest.args[0] is scores
    if not of_scores or shape_of(level) != (*shape_of(scores)[:-1], 1):
        raise _OtherwiseError
    return scores


def _scaled(argument: object) -> tuple[fx.Node, float]:
    node = _tensor(argument)
    if node.target is not aten.mul.Tensor:
        return node, 1.0
    product, scale = node.args[:2]
    if not isinstance(scale, int | float):
        raise _OtherwiseError
    return _tensor(product), float(scale)


def _of_heads(argument: object) -> fx.Node:
    """Return the tensor [1, heads, 1, 1] that is expanded to a score of each query."""
    sinks = _tensor(_call(_uncast(argument), aten.expand.default)["self"])
    shape = shape_of(sinks)
    if len(shape) != 4 or shape != (1, shape[1], 1, 1):
        raise _OtherwiseError
    return sinks


def _mask_of(draft: TracedGraph, mask: fx.Node, dtype: torch.dtype) -> dict[str, Any] | None:
    """Return what the call is told of a mask; None if it is not made of vectors, or hides by numbers that are small."""
    floating = value_of(mask).is_floating_point()
    hiding = hiding_of(mask) if floating else "infinity"
    if hiding == "other":
        return None
    reading, size = Reading(draft), shape_of(mask)[-1]
    with draft.graph.inserting_before(mask):
        try:
            found = reading.of(mask)
        except NotByPositionError:
            return None
    if hiding == "lowest":
        found = hidden_by_infinity(found)
    if floating and value_of(mask).dtype != dtype:
        found = Call("to", (found, dtype))
    text, vectors = str(found), reading.vectors
    reach = reach_of(text, vectors, size, size)
    window = size if reach is None else reach + 1
    if is_causal(found, vectors, size, window):
        seen, rising = window * (2 * size - window + 1) / (2 * size**2), window == size
    else:
        (seen, rising), window = share_seen(text, vectors, size, size), None
    return {"vectors": vectors, "mask": text, "seen": seen, "rising": rising, "reach": reach, "window": window}
