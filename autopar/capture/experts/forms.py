"""The forms in which models write the parts of dropless experts: what sorts, counts, gathers and puts back.

    flat = index.view(-1)            the expert of every slot, index being (T, K)
    ids, perm = sort(flat)           rows in the order of experts
    perm // K                        the token of every row
    cumsum(histc(flat))              where the rows of each expert end
    argsort(perm)                    the row of every slot

Transformers, torchtitan and what is written after them use these; each function tells whether a node is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.capture.passes.traced_graph import arguments, aten, shape_of, value_of
from autopar.capture.passes.views import VIEWS

SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
CASTS = (aten.to.dtype, aten._to_copy.default)
GATHERS = (aten.index.Tensor, aten.index_select.default, aten.gather.default)


@dataclass(frozen=True, slots=True)
class Sorting:
    """A sort of slots by expert."""

    flat: fx.Node
    """The expert of every slot."""
    ids: fx.Node | None
    """The same in the order of rows, where something reads it."""
    perm: fx.Node
    """The slot of every row."""

    @property
    def num_rows(self) -> int:
        return shape_of(self.perm)[0]


def sorting_of(node: fx.Node) -> Sorting | None:
    """Return the sort that a call makes if it may sort slots by expert: one dim of integers, ascending; else None."""
    given = arguments(node)
    flat = given["self"]
    if len(shape_of(flat)) != 1 or value_of(flat).is_floating_point() or given.get("descending"):
        return None
    if node.target in (aten.argsort.default, aten.argsort.stable):
        return Sorting(flat, None, node)
    outputs = {user.args[1]: user for user in node.users}
    return Sorting(flat, outputs.get(0), outputs[1]) if 1 in outputs else None


def without(node: Any, *targets: Any) -> Any:
    """Return the node behind calls of these targets."""
    while isinstance(node, fx.Node) and node.target in targets and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def plain(node: Any) -> Any:
    """Return the node behind casts and views."""
    return without(node, *CASTS, *VIEWS, aten.expand.default, aten.unsqueeze.default)


def divisor_of(node: fx.Node) -> int | None:
    """Return the integer by which a call divides with rounding down or toward zero; None if it does not."""
    if node.target is aten.floor_divide.default or (
        node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") in ("floor", "trunc")
    ):
        return node.args[1] if isinstance(node.args[1], int) else None
    return None


def gathered_by(node: fx.Node, places: fx.Node) -> fx.Node | None:
    """Return the tensor whose rows a call takes at `places`, along dim 0."""
    if node.target is aten.index.Tensor:
        source, index = node.args
        return source if list(index) == [places] else None  # type: ignore[call-overload]
    if node.target is aten.index_select.default:
        source, dim, index = node.args
        return source if dim == 0 and index is places else None  # type: ignore[return-value]
    if node.target is aten.gather.default:
        source, dim, index = node.args[:3]
        rows = isinstance(index, fx.Node) and shape_of(index)[1:] == shape_of(source)[1:]  # type: ignore[arg-type]
        return source if dim == 0 and rows and plain(index) is places else None  # type: ignore[return-value]
    return None


def is_counting(node: Any, sorting: Sorting, num_experts: int) -> bool:
    """Return whether a tensor holds the number of rows of each expert."""
    node = plain(node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    slots = {plain(sorting.flat), sorting.flat, sorting.ids}

    def counts(x: Any) -> bool:
        return plain(x) in slots and value_of(x).numel() == sorting.num_rows

    if node.target is aten.histc.default:
        given = arguments(node)
        ranges = given["bins"] == num_experts and given["min"] == 0 and given["max"] in (num_experts, num_experts - 1)
        return ranges and counts(given["self"])
    if node.target in (aten.scatter_add.default, aten.index_add.default):
        given = arguments(node)
        ones = given.get("src", given.get("source"))
        return given["dim"] == 0 and _is_full_of(given["self"], 0) and _is_full_of(ones, 1) and counts(given["index"])
    if node.target is aten.sum.dim_IntList:
        hot = without(node.args[0], *CASTS)
        return hot.target is aten.one_hot.default and shape_of(node) == (num_experts,) and counts(hot.args[0])
    return False


def is_ends(node: Any, sorting: Sorting, num_experts: int) -> bool:
    """Return whether a tensor holds the end offset of each expert's rows (a cumulative sum of the counts)."""
    node = without(node, *CASTS)
    return (
        isinstance(node, fx.Node)
        and node.target is aten.cumsum.default
        and node.args[1] in (0, -1)
        and is_counting(node.args[0], sorting, num_experts)
    )


def is_inverse(node: Any, perm: fx.Node) -> bool:
    """Return whether a tensor inverts the sort permutation: it holds the row of every slot."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target in (aten.argsort.default, aten.argsort.stable):
        return node.args[0] is perm
    if node.target is aten.index_put.default:
        places, values = node.args[1:3]
        return list(places) == [perm] and _counts_up(values)  # type: ignore[call-overload]
    if node.target is aten.scatter.src:
        return node.args[1] in (0, -1) and node.args[2] is perm and _counts_up(node.args[3])
    return False


def _counts_up(node: Any) -> bool:
    """Return whether a tensor is an arange 0, 1, 2, …, possibly cast."""
    node = without(node, *CASTS)
    if not isinstance(node, fx.Node):
        return False
    from_zero = node.target in (aten.arange.start, aten.arange.start_step) and node.args[0] == 0
    return node.target is aten.arange.default or bool(from_zero and node.args[2:3] in ((), (1,)))


FILLED = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
FILLING = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}


def _is_full_of(node: Any, number: int) -> bool:
    node = without(node, *CASTS, aten.expand.default)
    target: Any = node.target if isinstance(node, fx.Node) else None
    if target in FILLING:
        return bool(node.args[FILLING[target]] == number)
    return FILLED.get(target) == number


def is_zero(node: Any) -> bool:
    """Return whether a tensor consists of zeros."""
    return _is_full_of(node, 0)
