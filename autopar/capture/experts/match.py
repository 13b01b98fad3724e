"""Detection of dropless experts in a graph, from a sort of slots by expert to the sum of every token's rows.

A block is found by what it computes: rows gathered in the order of a sort, products grouped by the counts of what was
sorted, between them only calls that treat every row alone, and at the end the rows put back. Anything that differs is
no block, and stays as it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.experts.forms import (
    CASTS,
    GATHERS,
    Sorting,
    divisor_of,
    gathered_by,
    is_ends,
    is_inverse,
    plain,
    without,
)
from autopar.capture.passes.traced_graph import arguments, aten, shape_of
from autopar.capture.passes.views import VIEWS
from autopar.ir.program.operators.expert_operators import OTHER_GROUPED_PRODUCTS

PUT_BACK = (aten.index.Tensor, aten.index_add.default, aten.scatter_add.default, aten.index_put.default)
ALONG_LAST = (
    aten.chunk.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.glu.default,
    aten.unsqueeze.default,
)
"""Calls that treat each row alone where the dim that they name is the last."""
NORMS = (aten.layer_norm.default, aten.rms_norm.default)
"""Calls that treat each row alone where they normalize dims behind the first."""
ROW_BY_ROW = (aten.linear.default, *CASTS)
"""Calls that always do, as elementwise ones that draw nothing."""


@dataclass(frozen=True, slots=True)
class End:
    """End of a block of experts: the call that turns rows into tokens again."""

    node: fx.Node
    """Node that the rewrite replaces."""
    rows: fx.Node
    weights: fx.Node | None
    """The weights of rows in their order, a node with one number for each; None where they are summed as they are."""
    top_k: int
    """Number of slots that are summed into a token."""
    added: fx.Node | None = None
    """Tensor that the tokens are added to."""


@dataclass(frozen=True, slots=True)
class Block:
    """Dropless experts in a graph."""

    sorting: Sorting
    tokens: fx.Node
    """(T, D)"""
    top_k: int
    num_experts: int
    gathers: tuple[fx.Node, ...]
    scaled: fx.Node | None
    """The product of the gathered rows with their weights, where they are weighted before the experts."""
    products: tuple[fx.Node, ...]
    of_experts: tuple[fx.Node, ...]
    """Gathers of per-expert values for each row, such as a bias."""
    end: End


def block_of(sorting: Sorting) -> Block | None:
    """Return the block that begins with a sort; None where what follows is not one."""
    taken = _tokens(sorting)
    if taken is None:
        return None
    tokens, top_k, gathers = taken
    weights = tuple(each for each in _gathers_at(sorting.perm) if _is_weight(each, sorting))
    of_experts = _gathers_at(sorting.ids) if sorting.ids is not None else ()
    region: dict[fx.Node, None] = dict.fromkeys((*gathers, *of_experts))
    scaled, products, ends = None, [], []
    reached = _Reached(region)
    while reached.waiting:
        node = reached.next()
        inputs = [each for each in node.all_input_nodes if each in region]
        end = _end_of(node, sorting, region, weights)
        if end is not None:
            ends.append(end)
            continue
        if _is_product(node) and inputs == [node.args[0]]:
            products.append(node)
        elif scaled is None and not products and _is_scaled(node, gathers, weights):
            scaled = node
        elif not _treats_rows_alone(node, region, sorting.num_rows) and not _is_weighted(node, region, weights):
            return None
        region[node] = None
        reached.add(node)
    sizes = {shape_of(product.args[1])[0] for product in products}  # type: ignore[arg-type]
    if len(ends) != 1 or len(sizes) != 1:
        return None
    (num_experts,) = sizes
    if not all(is_ends(arguments(product)["offs"], sorting, num_experts) for product in products):
        return None
    if scaled is not None and (ends[0].weights is not None or any(_behind_casts(each) != [scaled] for each in gathers)):
        return None
    return Block(sorting, tokens, top_k, num_experts, gathers, scaled, tuple(products), of_experts, ends[0])


class _Reached:
    """The readers of some nodes, once each and in the order of the graph."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self.waiting: list[fx.Node] = []
        self._seen = set(nodes)
        for node in tuple(self._seen):
            self.add(node)

    def add(self, node: fx.Node) -> None:
        for user in node.users:
            if user not in self._seen:
                self._seen.add(user)
                heapq.heappush(self.waiting, user)

    def next(self) -> fx.Node:
        return heapq.heappop(self.waiting)


def _tokens(sorting: Sorting) -> tuple[fx.Node, int, tuple[fx.Node, ...]] | None:
    """Return the tokens whose rows are gathered, the experts of each, and the calls that gather them."""
    places: dict[fx.Node, int] = {sorting.perm: 1}
    for user in sorting.perm.users:
        top_k = divisor_of(user)
        if top_k is not None:
            places[user] = top_k
    for place, top_k in places.items():
        found = [
            (source, user)
            for user in _gathers_at(place)
            if (source := gathered_by(user, place)) is not None
            if len(shape_of(source)) == 2 and shape_of(source)[0] * top_k == sorting.num_rows
            if not _is_weight(user, sorting)
        ]
        sources = {source for source, _ in found}
        if len(sources) == 1 and (place is not sorting.perm or len(places) == 1):
            return sources.pop(), top_k, tuple(user for _, user in found)
    return None


def _gathers_at(places: fx.Node) -> tuple[fx.Node, ...]:
    """Return the calls that take rows at some places."""
    return tuple(user for user in _users(places) if user.target in GATHERS and gathered_by(user, places) is not None)


def _users(place: fx.Node) -> list[fx.Node]:
    """Return the calls that read `place`, directly or through views."""
    found: list[fx.Node] = []
    for user in place.users:
        viewed = user.target in (*VIEWS, aten.expand.default, aten.unsqueeze.default)
        found += _users(user) if viewed else [user]
    return found


def _is_weight(node: fx.Node, sorting: Sorting) -> bool:
    """Return whether a call gives one number for each row."""
    return len(shape_of(node)) == 1 or shape_of(node) == (sorting.num_rows, 1)


def _is_product(node: fx.Node) -> bool:
    if str(node.target) not in OTHER_GROUPED_PRODUCTS:
        return False
    given = arguments(node)
    return given.get("bias") is None and given.get("out_dtype") is None and len(shape_of(node.args[1])) == 3  # type: ignore[arg-type]


def _treats_rows_alone(node: fx.Node, region: dict[fx.Node, None], num_rows: int) -> bool:
    """Return whether a call computes every output row from the same input row alone, whatever their number."""
    outputs = node.meta.get("val")
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
    whole = node.op == "call_function" and len(tensors) == len(outputs)
    if not whole or any(x.shape[:1] != (num_rows,) for x in tensors):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # an item of a tuple
    last = tensors[0].ndim - 1
    others = [each for each in node.all_input_nodes if each not in region]
    if any(len(shape_of(each)) > last and shape_of(each)[:1] != (1,) for each in others):
        return False
    if node.target in ALONG_LAST:
        return last > 0 and arguments(node)["dim"] % (last + 1) == last
    if node.target in NORMS:
        return len(arguments(node)["normalized_shape"]) <= last
    elementwise = torch.Tag.pointwise in node.target.tags and torch.Tag.nondeterministic_seeded not in node.target.tags
    return elementwise or node.target in ROW_BY_ROW


def _weight_in(node: Any, weights: tuple[fx.Node, ...]) -> fx.Node | None:
    """Return the weights of rows that a factor is, seen through casts and new dims."""
    found = plain(node)
    return found if found in weights else None


def _factors(node: fx.Node, weights: tuple[fx.Node, ...]) -> tuple[fx.Node, fx.Node] | None:
    """Return the rows and the weights of a product that weights rows; None for any other call."""
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor:
        return None
    left, right = node.args[:2]
    for rows, factor in ((left, right), (right, left)):
        weight = _weight_in(factor, weights)
        if weight is not None and isinstance(rows, fx.Node) and shape_of(factor)[1:] == (1,):  # type: ignore[arg-type]
            return rows, factor  # type: ignore[return-value]
    return None


def _is_scaled(node: fx.Node, gathers: tuple[fx.Node, ...], weights: tuple[fx.Node, ...]) -> bool:
    """Return whether a call weights the gathered rows directly, before any expert runs."""
    found = _factors(node, weights)
    return found is not None and without(found[0], *CASTS) in gathers


def _is_weighted(node: fx.Node, region: dict[fx.Node, None], weights: tuple[fx.Node, ...]) -> bool:
    """Return whether a call weights rows of the region and only calls that put rows back read the result."""
    found = _factors(node, weights)
    return found is not None and found[0] in region and all(user.target in PUT_BACK for user in _behind_casts(node))


def _behind_casts(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for user in node.users:
        found += _behind_casts(user) if user.target in CASTS else [user]
    return found


def _end_of(node: fx.Node, sorting: Sorting, region: dict[fx.Node, None], weights: tuple[fx.Node, ...]) -> End | None:
    """Return the end of a block, if a call puts its rows back."""
    if node.target is aten.index.Tensor:
        source, places = node.args
        if source in region and len(places) == 1 and is_inverse(places[0], sorting.perm):  # type: ignore[arg-type]
            return _summed(node, *_weighted(source, weights))  # type: ignore[arg-type]
        return None
    given = arguments(node) if node.target in PUT_BACK else {}
    if node.target is aten.index_put.default:
        places, rows = given["indices"], given["values"]
        places = places[0] if len(places) == 1 and given["accumulate"] else None
    else:
        places, rows = given.get("index"), given.get("source", given.get("src"))
        if given.get("dim", 0) != 0 or given.get("alpha", 1) != 1:
            return None
    added = given.get("self")
    if rows not in region or not isinstance(added, fx.Node) or added in region:
        return None
    places, top_k = plain(places), 1
    if places is not sorting.perm:
        top_k = divisor_of(places) if isinstance(places, fx.Node) and places.args[0] is sorting.perm else None
    fits = top_k is not None and shape_of(added) == (sorting.num_rows // top_k, *shape_of(rows)[1:])
    if top_k is None or not fits or len(shape_of(rows)) != 2:
        return None
    rows, weight = _weighted(rows, weights)
    return End(node, rows, weight, top_k, added)


def _weighted(rows: fx.Node, weights: tuple[fx.Node, ...]) -> tuple[fx.Node, fx.Node | None]:
    """Return the rows before they were weighed, and the weights."""
    found = _factors(without(rows, *CASTS), weights)
    return (rows, None) if found is None else found


def _summed(node: fx.Node, rows: fx.Node, weight: fx.Node | None) -> End | None:
    """Return the end where rows are put in the order of slots, and those of a token then summed."""
    if len(shape_of(node)) != 2:
        return None
    view = next(iter(node.users), None)
    if len(node.users) == 1 and view is not None and view.target in VIEWS and len(shape_of(view)) == 3:
        total = next(iter(view.users), None)
        if len(view.users) == 1 and total is not None and total.target is aten.sum.dim_IntList:
            given = arguments(total)
            if list(given["dim"] or ()) in ([1], [-2]) and not given["keepdim"] and given["dtype"] is None:
                return End(total, rows, weight, shape_of(view)[1])
    return End(node, rows, weight, 1)
