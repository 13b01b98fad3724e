"""`embedding_bag` in the form that shards: by its pooled rows alone, and a row of indices for each bag of one size."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of
from autopar.ir.program.operators.embedding_bags import EMBEDDING_BAGS, RAGGED_EMBEDDING_BAGS

ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
VARIANTS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)


def pooled_bags(draft: TracedGraph) -> None:
    """Replace bags of equal size, as `nn.EmbeddingBag` calls them for two dims, by rows."""
    for node in draft.calls(*VARIANTS):
        given = arguments(node)
        pooled = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        if given["scale_grad_by_freq"] or given["sparse"] or len(pooled) != len(node.users):
            continue
        with draft.graph.inserting_before(node):
            bags = _bags(draft, given, node.meta["module"])
        for user in pooled:
            draft.replace(user, bags)
        draft.graph.erase_node(node)


def _bags(draft: TracedGraph, given: Mapping[str, Any], module: str) -> fx.Node:
    weight, indices, weights = given["weight"], given["indices"], given["per_sample_weights"]
    padding, size = given.get("padding_idx"), _size_of_bags(given)
    padding = -1 if padding is None else padding % shape_of(weight)[0]
    if size is None:
        last = given["include_last_offset"]
        call = weight, indices, given["offsets"], weights, given["mode"], last, padding
        return draft.call(RAGGED_EMBEDDING_BAGS, *call, module=module)
    rows = _in_rows(draft, indices, size, module)
    weights = None if weights is None else _in_rows(draft, weights, size, module)
    return draft.call(EMBEDDING_BAGS, weight, rows, weights, given["mode"], padding, module=module)


def _size_of_bags(given: Mapping[str, Any]) -> int | None:
    """Return the number of indices in each bag; None if it is unknown or differs between bags."""
    offsets, num_indices = given["offsets"], shape_of(given["indices"])[0]
    if offsets.target not in ARANGES or given["include_last_offset"] or not shape_of(offsets)[0]:
        return None
    specified = arguments(offsets)
    start, step = specified.get("start", 0), specified.get("step", 1)
    return step if start == 0 and step * shape_of(offsets)[0] == num_indices else None


def _in_rows(draft: TracedGraph, flat: fx.Node, size: int, module: str) -> fx.Node:
    """Return the flat tensor with one row for each bag: what was flattened, where it was that."""
    rows = (shape_of(flat)[0] // size, size)
    source = flat.args[0] if flat.target in (aten.view.default, aten.reshape.default) else None
    if isinstance(source, fx.Node) and shape_of(source) == rows:
        return source
    return draft.call(aten.reshape.default, flat, list(rows), module=module)
