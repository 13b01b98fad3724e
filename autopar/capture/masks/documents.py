"""Documents that are packed one after the other, their places given by cumulative lengths (`varlen_attn`).

The positions from cu[i] up to cu[i + 1] are document i. Such attention becomes an `attention_by_mask`: its vectors say
of each position in which document it is, and where in that, so that positions are divided as under any other mask.
Queries and keys of one document are aligned at its end, as flash attention does; where both have the same cumulative
lengths, that is by position.

PyTorch's own operator runs on CUDA alone; this one runs everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.capture.masks.reach import reach_of
from autopar.capture.masks.seen import share_seen
from autopar.capture.passes.refused_calls import where
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of, value_of
from autopar.errors import CaptureError
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK

VARLEN = "torch_attn::_varlen_attn"
"""The operator of `torch.nn.attention.varlen.varlen_attn`, which is there once that is imported."""
CACHES = ("seqused_k", "block_table")
"""Arguments that say where keys lie in a cache."""


def documents_by_position(draft: TracedGraph) -> None:
    """Let attention over packed documents be attention under a mask of vectors."""
    made: dict[object, fx.Node] = {}
    for node in draft.calls():
        if getattr(getattr(node.target, "_schema", None), "name", "") == VARLEN:
            _check_that_a_mask_can_say_it(node)
            with draft.graph.inserting_before(node):
                _replace_by_mask_operator(draft, node, made)


def _replace_by_mask_operator(draft: TracedGraph, node: fx.Node, made: dict[object, fx.Node]) -> None:
    """Let the attention of a node, and what takes its result, be that of `attention_by_mask`."""
    given = arguments(node)
    packed = _Packed(draft, made)
    text, vectors = packed.mask(given)
    tensors = [packed.made(aten.transpose.int, given[name], 0, 1) for name in ("query", "key", "value")]
    tensors = [packed.made(aten.unsqueeze.default, x, 0) for x in tensors]
    sizes = shape_of(given["query"])[0], shape_of(given["key"])[0]
    seen, rising = share_seen(text, vectors, *sizes)
    reach = reach_of(text, vectors, *sizes)
    # By other cumulative lengths of keys it is not known, but likely.
    rising = rising or (sizes[0] == sizes[1] and _window_of(given)[1] == 0 and reach is None)
    further = {"scale": given["scale"], "seen": seen, "rising": rising, "reach": reach}
    module = node.meta["module"]
    out = draft.call(ATTENTION_BY_MASK, *tensors, vectors, text, module=module, **further)
    out = draft.call(aten.squeeze.dim, out, 0, module=module)
    out = draft.call(aten.transpose.int, out, 0, 1, module=module)
    for user in list(node.users):
        draft.replace(user, out)
    draft.graph.erase_node(node)


def _window_of(given: dict[str, Any]) -> tuple[int, int]:
    """Return the number of positions before and after its own that a query sees; -1 means all."""
    before, behind = given["window_size"] or (-1, -1)
    return before, 0 if given["is_causal"] else behind


@dataclass(slots=True)
class _Packed:
    """Builder of masks over packed positions, which makes each call only once for all layers."""

    draft: TracedGraph
    calls: dict[object, fx.Node]

    def mask(self, given: dict[str, Any]) -> tuple[str, list[fx.Node]]:
        """Return the expression of what a query sees, and its vectors."""
        lengths = given["cu_seq_q"], given["cu_seq_k"]
        sizes = shape_of(given["query"])[0], shape_of(given["key"])[0]
        same = lengths[0] is lengths[1] and sizes[0] == sizes[1]
        positions = [
            self.made(aten.arange.default, size, dtype=value_of(cu).dtype)
            for cu, size in zip(lengths, sizes, strict=True)
        ]
        documents = [self._documents(cu, at) for cu, at in zip(lengths, positions, strict=True)]
        vectors, text = [self._column(documents[0]), documents[1]], "eq(v0, v1)"
        before, behind = _window_of(given)
        if before < 0 and behind < 0:
            return text, vectors
        if not same:
            positions = [self._before_end(*each) for each in zip(lengths, documents, positions, strict=True)]
        vectors += [self._column(positions[0]), positions[1]]
        if behind >= 0:
            text = f"bitwise_and({text}, le(v3, {f'add(v2, {behind})' if behind else 'v2'}))"
        if before >= 0:
            text = f"bitwise_and({text}, ge(v3, {f'sub(v2, {before})' if before else 'v2'}))"
        return text, vectors

    def _documents(self, cu: fx.Node, positions: fx.Node) -> fx.Node:
        """Return the number of each position's document; behind the last one are those of none, as of one more."""
        ends = self.made(aten.slice.Tensor, cu, 0, 1)
        return self.made(aten.searchsorted.Tensor, ends, positions, right=True)

    def _before_end(self, cu: fx.Node, documents: fx.Node, positions: fx.Node) -> fx.Node:
        """Return the place of each position in its document, counted from the end, below zero."""
        last = shape_of(cu)[0] - 1
        behind = self.made(aten.clamp.default, self.made(aten.add.Tensor, documents, 1), None, last)
        return self.made(aten.sub.Tensor, positions, self.made(aten.index_select.default, cu, 0, behind))

    def _column(self, vector: fx.Node) -> fx.Node:
        return self.made(aten.unsqueeze.default, vector, 1)

    def made(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        key = target, args, tuple(kwargs.items())
        if key not in self.calls:
            self.calls[key] = self.draft.call(target, *args, **kwargs)
        return self.calls[key]


def _check_that_a_mask_can_say_it(node: fx.Node) -> None:
    given, place = arguments(node), where(node.meta["module"])
    cache = next((name for name in CACHES if given[name] is not None), None)
    if cache or given["cu_seq_k"] is None:
        raise CaptureError(
            f"varlen_attn in {place} has {cache or 'no cu_seq_k'}, as attention to a cache of keys, "
            "which a captured graph does not hold; give keys and values of the same call, with their cu_seq_k."
        )
    if any(user.target is not operator.getitem or user.args[1] for user in node.users):
        raise CaptureError(
            f"varlen_attn in {place} returns the log-sum-exp of its scores (return_aux), which autopar does not keep "
            "with a sharded result; leave return_aux out."
        )
