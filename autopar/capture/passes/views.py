"""Views in one form, with sizes, and with dims taken apart where they mean different things.

`view` says that no memory moves. That is sure only where strides do not come from a kernel's own choice (attention and
convolutions give other strides on other devices and for other sizes); elsewhere a `reshape` stands.
"""

from __future__ import annotations

import math

from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, set_call, shape_of, value_of

VIEWS = (aten.view.default, aten.reshape.default)
"""The two forms that `state_sizes` leaves."""
TO_EXPAND = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
TO_VIEW = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
KERNEL_STRIDES = (
    aten.scaled_dot_product_attention.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
)
"""Operations whose kernels choose the strides of what they give: on another device, or on a part, they may differ."""
OWN_STRIDES = (
    aten.linear.default,
    aten.matmul.default,
    aten.addmm.default,
    aten.mm.default,
    aten.bmm.default,
    aten.contiguous.default,
    aten.layer_norm.default,
)
"""Operations that give contiguous tensors whatever they are given."""


MERGED_DIMS = 3
"""Dims of a batch of matrices: batch and heads as one, rows, columns."""


def state_sizes(draft: TracedGraph) -> None:
    """Give views and expansions explicit sizes; a reshape that surely moves no memory is a view."""
    unsure = _unsure_strides(draft)
    for node in draft.calls(*TO_VIEW, *TO_EXPAND):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target in TO_EXPAND:
            target = aten.expand.default
        elif value_of(source).is_contiguous() and source not in unsure:
            target = aten.view.default
        else:
            target = aten.reshape.default
        set_call(node, target, source, list(shape_of(node)))


def split_before_permuting(draft: TracedGraph) -> None:
    """Replace view → permute → view that splits by one view and a permutation.

    nn.MultiheadAttention merges batch and heads, transposes, and splits them again; while they are one dim, heads
    cannot be sharded.
    """
    for node in draft.calls(*VIEWS):
        moved = node.args[0]
        if not isinstance(moved, fx.Node) or moved.target not in (aten.transpose.int, aten.permute.default):
            continue
        merged = moved.args[0]
        assert isinstance(merged, fx.Node)
        groups = _split_groups(shape_of(moved), shape_of(node))
        if merged.target not in VIEWS or groups is None:
            continue
        order = _permutation(moved)
        groups_before = [groups[order.index(dim)] for dim in range(len(order))]
        first_dim = [sum(map(len, groups_before[:dim])) for dim in range(len(order))]
        dims = [first_dim[dim] + i for dim in order for i in range(len(groups_before[dim]))]
        module = node.meta["module"]
        with draft.graph.inserting_before(node):
            sizes = [size for group in groups_before for size in group]
            apart = draft.call(aten.reshape.default, merged.args[0], sizes, module=module)
            draft.replace(node, draft.call(aten.permute.default, apart, dims, module=module))


def batch_and_heads_apart(draft: TracedGraph) -> None:
    """Replace products of matrices, batched over merged batch and heads, by products of unmerged tensors.

    Attention that is written with bmm or baddbmm (as BLOOM's) merges batch and heads before a product and splits them
    after it; while they are one dim, heads cannot be sharded.
    """
    for node in draft.calls(aten.bmm.default, aten.baddbmm.default):
        given = arguments(node)
        first, second = (
            (given["self"], given["mat2"]) if node.target is aten.bmm.default else (given["batch1"], given["batch2"])
        )
        shape, users = shape_of(node), list(node.users)
        splits = {shape_of(user) if user.target in VIEWS else () for user in users}
        wanted = splits.pop() if len(splits) == 1 else ()
        is_split = len(wanted) > len(shape) and wanted[-2:] == shape[-2:]
        if not (is_split and _is_merged(first, wanted[:-2]) and _is_merged(second, wanted[:-2])):
            continue
        module = node.meta["module"]
        with draft.graph.inserting_before(node):
            left, right = (_unmerged(draft, each, wanted[:-2]) for each in (first, second))
            if given.get("alpha", 1) != 1:
                left = draft.call(aten.mul.Tensor, left, given["alpha"], module=module)
            product = draft.call(aten.matmul.default, left, right, module=module)
            if node.target is aten.baddbmm.default and given["beta"] != 0:
                added = _unmerged(draft, given["self"], wanted[:-2])
                if given["beta"] != 1:
                    added = draft.call(aten.mul.Tensor, added, given["beta"], module=module)
                product = draft.call(aten.add.Tensor, product, added, module=module)
        for user in users:
            draft.replace(user, product)


def _is_merged(node: fx.Node, leading: tuple[int, ...]) -> bool:
    """Return whether a tensor comes from one with these leading dims, which a view merged into its first dim."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target in VIEWS:
        return shape_of(source) == (*leading, *shape_of(node)[1:])
    return _keeps_batch(node) and _is_merged(source, leading)


def _keeps_batch(node: fx.Node) -> bool:
    """Return whether a call treats the entries of its input's first dim alike, and nothing else reads its result."""
    if len(node.users) > 1 or len(shape_of(node)) != MERGED_DIMS:
        return False
    if node.target is aten.transpose.int:
        return all(dim % MERGED_DIMS for dim in node.args[1:])  # type: ignore[operator]
    if node.target is aten.softmax.int:
        return node.args[1] % MERGED_DIMS == MERGED_DIMS - 1  # type: ignore[operator]
    is_scaled = node.target in (aten.mul.Tensor, aten.div.Tensor) and not isinstance(node.args[1], fx.Node)
    return is_scaled or node.target in (aten.to.dtype, aten.dropout.default)


def _unmerged(draft: TracedGraph, node: fx.Node, leading: tuple[int, ...]) -> fx.Node:
    """Return a tensor with these leading dims in place of its first one, where that has as many entries."""
    shape, module = shape_of(node), node.meta.get("module", "")
    if len(shape) < MERGED_DIMS or shape[0] != math.prod(leading):
        return node  # broadcast
    source = node.args[0] if node.args else None
    if not _is_merged(node, leading) or not isinstance(source, fx.Node):
        return draft.call(aten.reshape.default, node, [*leading, *shape[1:]], module=module)
    if node.target in VIEWS:
        return source
    inner = _unmerged(draft, source, leading)
    if node.target is aten.transpose.int:
        return draft.call(aten.transpose.int, inner, -1, -2, module=module)
    rest = (-1, *node.args[2:]) if node.target is aten.softmax.int else node.args[1:]
    return draft.call(node.target, inner, *rest, module=module, **node.kwargs)  # type: ignore[arg-type]


def _unsure_strides(draft: TracedGraph) -> set[fx.Node]:
    """Return the nodes whose strides follow from what a kernel chose."""
    unsure: set[fx.Node] = set()
    for node in draft.calls():
        follows = node.target not in OWN_STRIDES and any(source in unsure for source in node.all_input_nodes)
        if node.target in KERNEL_STRIDES or follows:
            unsure.add(node)
    return unsure


def _permutation(node: fx.Node) -> list[int]:
    """Return for each dim of a permutation's output the dim of its input that it is."""
    ndim = len(shape_of(node))
    if node.target is aten.permute.default:
        dims = node.args[1]
        assert isinstance(dims, list | tuple)
        return [dim % ndim for dim in dims]  # type: ignore[operator]
    order = list(range(ndim))
    a, b = node.args[1], node.args[2]
    assert isinstance(a, int) and isinstance(b, int)
    order[a], order[b] = order[b], order[a]
    return order


def _split_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Return the sizes that each dim is split into, where a view only splits; None where it merges or changes nothing.

    >>> _split_groups((6, 4), (2, 3, 4))
    [(2, 3), (4,)]
    """
    groups: list[tuple[int, ...]] = []
    left = list(after)
    for size in before:
        group: list[int] = []
        product = 1
        while left and (product < size or not group):
            group.append(left.pop(0))
            product *= group[-1]
        if product != size:
            return None
        groups.append(tuple(group))
    return groups if not left and len(after) > len(before) else None
