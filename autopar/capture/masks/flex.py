"""Attention by `flex_attention`, as `capture.flex` records it: one call that makes no scores, where that is possible.

A score_mod is read as an expression in vectors and in the score, as masks are (`reading`), and
the call becomes an `attention_by_mask`. Where it is no such expression (a table that is looked up by query and key), a
function has no derivative there, what it captures needs a gradient, or the log-sum-exp is returned, the scores are
written out as tensors of queries by keys.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from autopar.capture.masks.reach import reach_of
from autopar.capture.masks.reading import NotByPositionError, Reading
from autopar.capture.masks.seen import constant, share_seen
from autopar.capture.masks.shared_heads import without_repeats
from autopar.capture.passes.traced_graph import TracedGraph, aten, shape_of, value_of
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.expressions import (
    Call,
    Expression,
    Score,
    is_differentiable,
    reads_scores,
)
from autopar.ir.program.operators.attention.flex_calls import FLEX_SCORES, FLEX_VALUES

ATTENTION = aten.scaled_dot_product_attention.default
PRECISE = (torch.float32, torch.float64)
"""Dtypes in which a mask of numbers is added as scores are computed; flex attention computes in float32 at least."""
LARGEST_TABLE = 2**22
"""Elements of a tensor whose lookups are compared with all of it."""


def flex_attention(draft: TracedGraph) -> None:
    """Let each flex attention be one call, or the calls that it consists of."""
    for node in draft.calls(aten.index.Tensor):
        if _is_identity(node):
            draft.replace(node, node.args[0])  # type: ignore[arg-type]
    for node in draft.calls(FLEX_VALUES):
        with draft.graph.inserting_before(node):
            fused = _attention_of_scores(draft, node)
            if fused is None:
                _write_out_values(draft, node)
                continue
        for user in list(node.users):
            draft.replace(user, fused)
        draft.graph.erase_node(node)
    for node in draft.calls(FLEX_SCORES):
        with draft.graph.inserting_before(node):
            _write_out_scores(draft, node)


def _attention_of_scores(draft: TracedGraph, node: fx.Node) -> fx.Node | None:
    scores, mask, value, raw = node.args
    assert isinstance(scores, fx.Node) and isinstance(value, fx.Node) and isinstance(raw, fx.Node)
    if any(user.target is not operator.getitem or user.args[1] for user in node.users):
        return None
    query, key, scale = raw.args
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    if scores is raw:  # under a mask alone, of which kernels may know
        shared = shape_of(query)[1] != shape_of(key)[1]
        call = query, key, value, mask
        return draft.call(ATTENTION, *call, scale=scale, enable_gqa=shared, module=node.meta["module"])
    reading = Reading(draft, score=raw)
    try:
        found = _bias_of_scores(reading.of(scores), value_of(query).dtype)
        if isinstance(mask, fx.Node):
            found = Call("masked_fill", (found, Call("logical_not", (reading.of(mask),)), -math.inf))
    except NotByPositionError:
        return None
    if not is_differentiable(found) or any(value_of(each).requires_grad for each in reading.vectors):
        return None
    text, sizes = str(found), (shape_of(query)[2], shape_of(key)[2])
    seen, rising = share_seen(text, reading.vectors, *sizes)
    reach = reach_of(text, reading.vectors, *sizes)
    further = {"scale": scale, "seen": seen, "rising": rising, "reach": reach}
    call = query, *without_repeats(key, value), reading.vectors, text
    return draft.call(ATTENTION_BY_MASK, *call, module=node.meta["module"], **further)


def _bias_of_scores(found: Expression, dtype: torch.dtype) -> Expression:
    """Return what a function adds to scores, if it does nothing else and kernels add it as precisely."""
    if dtype in PRECISE and isinstance(found, Call) and found.name == "add" and len(found.arguments) == 2:
        one, other = found.arguments
        one, other = (one, other) if isinstance(one, Score) else (other, one)
        if isinstance(one, Score) and isinstance(other, Call) and not reads_scores(other):
            return Call("to", (other, dtype))
    return found


def _write_out_scores(draft: TracedGraph, node: fx.Node) -> None:
    query, key, scale = node.args
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    heads, module = shape_of(query)[1], node.meta["module"]
    transposed = draft.call(
        aten.transpose.int, _repeated_for_query_heads(draft, key, heads, module), -2, -1, module=module
    )
    scores = draft.call(aten.matmul.default, query, transposed, module=module)
    if value_of(scores).dtype != value_of(node).dtype:
        scores = draft.call(aten.to.dtype, scores, value_of(node).dtype, module=module)
    draft.replace(node, draft.call(aten.mul.Tensor, scores, scale, module=module))


def _write_out_values(draft: TracedGraph, node: fx.Node) -> None:
    scores, mask, value, _ = node.args
    assert isinstance(scores, fx.Node) and isinstance(value, fx.Node)
    heads, module = shape_of(scores)[1], node.meta["module"]
    if isinstance(mask, fx.Node):
        hidden = draft.call(aten.logical_not.default, mask, module=module)
        scores = draft.call(aten.masked_fill.Scalar, scores, hidden, -math.inf, module=module)
    weights = draft.call(aten._safe_softmax.default, scores, -1, module=module)
    if value_of(weights).dtype != value_of(value).dtype:
        weights = draft.call(aten.to.dtype, weights, value_of(value).dtype, module=module)
    out = draft.call(
        aten.matmul.default, weights, _repeated_for_query_heads(draft, value, heads, module), module=module
    )
    for user in list(node.users):
        given = draft.call(aten.logsumexp.default, scores, [-1], module=module) if user.args[1] else out
        draft.replace(user, given)
    draft.graph.erase_node(node)


def _repeated_for_query_heads(draft: TracedGraph, key: fx.Node, heads: int, module: str) -> fx.Node:
    batch, shared, *rest = shape_of(key)
    if shared == heads:
        return key
    single = draft.call(aten.unsqueeze.default, key, 2, module=module)
    expanded = draft.call(aten.expand.default, single, [batch, shared, heads // shared, *rest], module=module)
    return draft.call(aten.reshape.default, expanded, [batch, heads, *rest], module=module)


def _is_identity(node: fx.Node) -> bool:
    """Return whether a lookup gives all that it looks in, as x[arange(len(x))] does."""
    source, indices = node.args
    assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
    size = math.prod(shape_of(source))
    if shape_of(source) != shape_of(node) or size > LARGEST_TABLE:
        return False
    known: dict[fx.Node, torch.Tensor | None] = {}
    places = [constant(each, known) if isinstance(each, fx.Node) else None for each in indices]
    if any(place is None and each is not None for place, each in zip(places, indices, strict=True)):
        return False
    whole = torch.arange(size).view(shape_of(source))
    return torch.equal(aten.index.Tensor(whole, places), whole)
