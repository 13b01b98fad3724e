"""Labels in the dims of their rows, and labels that are ignored in place of positions cut off before a loss.

    cross_entropy_loss(logits[:, :-1], labels[:, 1:])
        becomes  cross_entropy_loss(logits, pad(labels[:, 1:], one behind, ignore_index))

Of S positions S - 1 are left where each token is predicted by those before it, and they divide over no axis that S
divides over. A loss of S rows, of which some are ignored, is the same, and keeps positions split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, set_call, shape_of, value_of
from autopar.capture.passes.views import VIEWS
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY

ONE_TENSOR = (aten.contiguous.default, aten.clone.default)
"""Calls that give the tensor that they are given."""
NONE = 0
"""PyTorch's number for the argument `reduction`."""
ONE_IN = 8
"""Minimum number of positions per position cut off.

More cut positions, as ignored rows, cost more than splitting positions saves.
"""

Cut = tuple[int, int, int]
"""Dim, and the positions cut off before and behind."""


def ignored_positions(draft: TracedGraph) -> None:
    """Let losses take all positions and ignore those that a model cuts off before."""
    for loss in draft.calls(CROSS_ENTROPY):
        given, module = arguments(loss), loss.meta["module"]
        logits, dtypes, cuts = _uncut(given["self"])
        if not cuts or given["reduction"] == NONE or not _removes_few(shape_of(logits), cuts):
            continue
        with draft.graph.inserting_before(loss):
            for dtype in dtypes:
                logits = draft.call(aten.to.dtype, logits, dtype, module=module)
            target = with_ignored(draft, given["target"], cuts, given["ignore_index"], module)
            set_call(loss, CROSS_ENTROPY, logits, target, *loss.args[2:])


def _uncut(node: fx.Node) -> tuple[fx.Node, list[torch.dtype], list[Cut]]:
    """Return the tensor whose positions were sliced, the dtypes of later casts, and the slices, the last one first."""
    logits, dtypes, cuts = node, [], []
    casts: list[torch.dtype] = []
    while (cuts_here := cuts_positions(node)) or node.target in (aten.to.dtype, *ONE_TENSOR):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if cuts_here:
            cuts.append(cut_of(node))
            logits, dtypes = source, casts[::-1]
        elif node.target is aten.to.dtype:
            casts.append(value_of(node).dtype)
        node = source
    return logits, dtypes, cuts


def _removes_few(shape: Sequence[int], cuts: Iterable[Cut]) -> bool:
    """Return whether the cuts remove at most one in `ONE_IN` positions of each dim."""
    return all(ONE_IN * (before + behind) <= shape[dim] for dim, before, behind in cuts)


def cuts_positions(node: fx.Node) -> bool:
    """Return whether a call is a slice with step 1 along a dim of rows, which is any but the last."""
    if node.target is not aten.slice.Tensor:
        return False
    given, ndim = arguments(node), len(shape_of(node))
    return given["step"] == 1 and given["dim"] % ndim != ndim - 1


def cut_of(node: fx.Node) -> Cut:
    """Return the positions that a slice cuts off: its dim, and the number before and behind."""
    given = arguments(node)
    dim = given["dim"] % len(shape_of(node))
    size, kept = shape_of(given["self"])[dim], shape_of(node)[dim]
    start = min(given["start"] or 0, size)
    start = start if start >= 0 else max(size + start, 0)
    return dim, start, size - start - kept


def with_ignored(draft: TracedGraph, target: fx.Node, cuts: Iterable[Cut], ignored: int, module: str) -> fx.Node:
    """Return the labels with ones that are ignored where positions were cut off, of which the last cut comes first."""
    for dim, before, behind in cuts:
        sides = [0] * (2 * (len(shape_of(target)) - dim - 1)) + [before, behind]
        target = draft.call(aten.constant_pad_nd.default, target, sides, ignored, module=module)
    return target


def in_rows(draft: TracedGraph, target: fx.Node, rows: tuple[int, ...], module: str) -> fx.Node:
    """Return the labels in this shape: what was flattened, where it was that."""
    source = target
    while source.target in (*VIEWS, *ONE_TENSOR) and shape_of(source) != rows and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    if shape_of(source) == rows:
        return source
    return draft.call(aten.reshape.default, target, list(rows), module=module)
