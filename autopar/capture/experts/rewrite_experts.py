"""Dropless experts, as `match` finds them, in the four operators of `ir.program.operators.expert_operators`."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.capture.experts.capacity import SLOT_DIMS
from autopar.capture.experts.forms import SORTS, gathered_by, is_zero, plain, sorting_of
from autopar.capture.experts.match import Block, block_of
from autopar.capture.passes.traced_graph import TracedGraph, aten, shape_of, value_of
from autopar.capture.passes.views import VIEWS
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, GROUPED_MM, OF_EXPERT


def sorted_experts(draft: TracedGraph) -> None:
    """Rewrite gathers of rows in the order of their experts as dispatches."""
    for node in draft.calls(*SORTS):
        sorting = sorting_of(node)
        block = block_of(sorting) if sorting is not None else None
        if block is not None:
            _rewrite(draft, block)


def _rewrite(draft: TracedGraph, block: Block) -> None:
    graph, module, num_rows = draft.graph, block.gathers[0].meta["module"], block.sorting.num_rows
    # Rows that are weighted first, or not summed at the end, are tokens of one expert each.
    by_slot = block.scaled is not None or block.end.top_k != block.top_k
    top_k = 1 if by_slot else block.top_k
    with graph.inserting_before(block.scaled or block.gathers[0]):
        tokens = _slots_of(draft, block) if by_slot else block.tokens
        index = _in_slots(draft, block.sorting.flat, (num_rows // top_k, top_k))
        sent = draft.call(DISPATCH, tokens, index, block.num_experts, module=module)
        sent.meta[SLOT_DIMS] = 2 if top_k < block.top_k else 1
        rows, counts, ids, route, splits = (draft.call(operator.getitem, sent, i, module=module) for i in range(5))
    for node in (block.scaled,) if block.scaled is not None else block.gathers:
        node.replace_all_uses_with(rows)
    end, was = block.end, value_of(block.end.node)
    with graph.inserting_before(end.node):
        rows = end.rows if end.rows not in (*block.gathers, block.scaled) else rows
        weights = None if end.weights is None else _weights(draft, block, end.weights, (num_rows // top_k, top_k))
        y = draft.call(COMBINE, rows, weights, route, counts, splits, module=end.node.meta["module"])
        if top_k < end.top_k:
            slots = draft.call(aten.view.default, y, [-1, end.top_k, shape_of(y)[-1]], module=module)
            y = draft.call(aten.sum.dim_IntList, slots, [1], module=module)
        y = _cast(draft, y, was.dtype)
        if end.added is not None and not is_zero(end.added):
            y = draft.call(aten.add.Tensor, end.added, y, module=module)
        draft.replace(end.node, y)
    for node in block.of_experts:
        with graph.inserting_before(next(each for each in graph.nodes if each in node.users)):
            values = gathered_by(node, block.sorting.ids) if block.sorting.ids else None
            draft.replace(node, draft.call(OF_EXPERT, values, ids, counts, module=module))
    for node in block.products:
        with graph.inserting_before(node):
            draft.replace(node, draft.call(GROUPED_MM, *node.args[:2], counts, module=node.meta["module"]))


def _slots_of(draft: TracedGraph, block: Block) -> fx.Node:
    """Return the tokens once for each of their experts, weighted where rows are: (R, D)."""
    module, (num_tokens, size) = block.gathers[0].meta["module"], shape_of(block.tokens)
    alone, slots = block.top_k == 1, block.tokens
    if not alone:
        slots = draft.call(aten.unsqueeze.default, slots, 1, module=module)
    if block.scaled is None:
        slots = draft.call(aten.expand.default, slots, [num_tokens, block.top_k, size], module=module)
    else:
        factors = [each for each in block.scaled.args[:2] if isinstance(each, fx.Node)]
        rows = next(each for each in factors if shape_of(each)[1:] != (1,) or plain(each) in block.gathers)
        (factor,) = (each for each in factors if each is not rows)
        weights = _weights(draft, block, factor, (num_tokens, block.top_k))
        if not alone:
            weights = draft.call(aten.unsqueeze.default, weights, 2, module=module)
        slots = draft.call(aten.mul.Tensor, _cast(draft, slots, value_of(rows).dtype), weights, module=module)
    if alone:
        return slots
    return draft.call(aten.reshape.default, slots, [num_tokens * block.top_k, size], module=module)


def _weights(draft: TracedGraph, block: Block, factor: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """Return the weights of slots that were sorted to be a factor of rows."""
    flat = gathered_by(plain(factor), block.sorting.perm)
    assert flat is not None
    return _cast(draft, _in_slots(draft, flat, shape), value_of(factor).dtype)


def _in_slots(draft: TracedGraph, flat: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """Return the flattened tensor in this shape again, skipping views on the way to its source."""
    while flat.target in VIEWS and shape_of(flat) != shape:
        source = flat.args[0]
        assert isinstance(source, fx.Node)
        if shape_of(source)[: len(shape) - 1] != shape[:-1] and shape_of(source) != shape:
            break
        flat = source
    if shape_of(flat) == shape:
        return flat
    return draft.call(aten.reshape.default, flat, list(shape), module=flat.meta["module"])


def _cast(draft: TracedGraph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if value_of(x).dtype == dtype else draft.call(aten.to.dtype, x, dtype, module=x.meta["module"])
