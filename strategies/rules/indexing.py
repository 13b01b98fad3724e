"""Operations that pick, place, join, cut and shift elements along dims: those dims stay whole, the others are free.

They are linear: those that join or write are linear in all their tensors together ("+").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import (
    Answer,
    Entry,
    along_dims,
    broadcast,
    dim_of,
    dims_of,
    is_bool,
    names,
    positive,
    rule,
    term,
    whole_at,
)

aten = torch.ops.aten


def mark(call: Call, one: str = "~") -> str:
    """`one`, unless some input that would be partial is bool."""
    floats = [info for info in call.inputs if not is_bool(info)]
    return one if len(floats) == len(call.inputs) else ""


def cut(call: Call) -> str:
    """One output or several, each a part of a dim."""
    dims = names(len(call.inputs[0].shape))
    dims[dim_of(call)] = WHOLE
    return rule([term(dims, mark(call))], [term(dims)] * len(call.outputs))


def slice_(call: Call) -> str:
    """A range of a dim; the dim is free where the range is all of it, or takes one place of each group of some."""
    if call.outputs[0].shape == call.inputs[0].shape and (call["end"] is None or call["end"] >= 2**31):
        dims = names(len(call.inputs[0].shape))
        return rule([term(dims, mark(call))], [term(dims)])
    size, step, dim = call.inputs[0].shape[dim_of(call)], call["step"], dim_of(call)
    to_the_end = call["end"] is None or call["end"] >= size
    if step > 1 and 0 <= (call["start"] or 0) < step and to_the_end and size % step == 0:
        dims = names(len(call.inputs[0].shape))
        groups = [*dims[:dim], f"({dims[dim]} step)", *dims[dim + 1 :]]
        return rule([term(groups, mark(call))], [term(dims)])
    return cut(call)


def pick(call: Call) -> str:
    """One or all places of a dim, which the outputs lack."""
    dims = names(len(call.inputs[0].shape))
    dim = dim_of(call)
    kept = [*dims[:dim], *dims[dim + 1 :]]
    return rule([term(whole_at(dims, [dim]), mark(call))], [term(kept)] * len(call.outputs))


def cat(call: Call) -> str:
    """Tensors one after the other along a dim; a tensor without elements may have another rank."""
    ndim = len(call.outputs[0].shape)
    dims = names(ndim)
    if len(call.inputs) > 1:
        dims[positive(call["dim"], ndim)] = WHOLE
    terms = [
        term(dims if len(info.shape) == ndim else [WHOLE] * len(info.shape), mark(call, "+")) for info in call.inputs
    ]
    return rule(terms, [term(dims)])


def stack(call: Call) -> str:
    """Tensors side by side along a new dim."""
    ndim = len(call.outputs[0].shape)
    dims = names(ndim - 1)
    dim = positive(call["dim"], ndim)
    return rule([term(dims, mark(call, "+"))] * len(call.inputs), [term([*dims[:dim], WHOLE, *dims[dim:]])])


def pad(call: Call) -> str:
    """Elements before and behind; linear unless they are a number other than zero."""
    ndim, amounts = len(call.inputs[0].shape), call["pad"]
    padded = [ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount]
    if call.arguments.get("mode", "constant") != "constant":
        padded = [ndim - 1 - i // 2 for i in range(len(amounts))]
    dims = whole_at(names(ndim), padded)
    return rule([term(dims, "" if call["value"] else mark(call))], [term(dims)])


def roll(call: Call) -> str:
    """Elements shifted in a circle; without dims, through the flattened tensor."""
    return along_dims("dims", "~")(call)


def triangle(call: Call) -> str:
    """Zeros on one side of a diagonal of the last two dims."""
    ndim = len(call.inputs[0].shape)
    dims = whole_at(names(ndim), (ndim - 2, ndim - 1))
    return rule([term(dims, mark(call))], [term(dims)])


def gather(call: Call) -> str:
    """Along one dim by an index that has all dims; those where it is shorter stay whole."""
    source, index = call["self"].shape, call["index"].shape
    dims, dim = names(len(index)), dim_of(call)
    short = [i for i in range(len(index)) if i != dim and index[i] != source[i]]
    dims = whole_at(dims, short)
    return rule([term(whole_at(dims, [dim]), _mark_of(call["self"])), term(dims)], [term(dims)])


def _mark_of(info: TensorInfo, one: str = "~") -> str:
    return "" if is_bool(info) else one


def index_select(call: Call) -> str:
    """Along one dim by an index that becomes that dim."""
    if not call["self"].shape:
        return rule([term([], _mark_of(call["self"])), term([WHOLE] * len(call["index"].shape))], ["()"])
    dims, dim = names(len(call["self"].shape)), dim_of(call)
    index = [dims[dim]] if call["index"].shape else []
    return rule([term(whole_at(dims, [dim]), _mark_of(call["self"])), term(index)], [term(dims)])


def index(call: Call) -> Answer:
    """`self[indices]`: the dims of the broadcast indices take the place of the indexed dims."""
    places = _Indices.of(call)
    if places is None:
        return None
    picked = term(whole_at(places.dims, places.indexed), _mark_of(call["self"]))
    return rule([picked, *places.terms()], [term(places.result)])


def index_put(call: Call) -> Answer:
    """`self[indices] = values`, or `+=`: only a sum may be split along the indices."""
    places = _Indices.of(call)
    if places is None or any(is_bool(info) for info in (call["self"], call["values"])):
        return None
    result = places.result
    if not call["accumulate"]:
        result = [WHOLE if name in places.names else name for name in result]
        places.names[:] = [WHOLE] * len(places.names)
    kept = term(whole_at(places.dims, places.indexed))
    values = term(broadcast(call["values"].shape, places.shape, result), "~")
    return rule([f"+{kept}", *places.terms(), values], [kept])


class _Indices:
    """Dims on which the indices of `index` and `index_put` act.

    `dims` are those of self, `indexed` the positions of those with an index, and `shape` the shape after indexing.
    """

    def __init__(self, shape: Sequence[int], indices: Sequence[TensorInfo | None]) -> None:
        self.given = [info for info in indices if info is not None]
        self.indexed = [i for i, info in enumerate(indices) if info is not None]
        self.common = torch.broadcast_shapes(*(info.shape for info in self.given))
        self.dims = names(len(shape))
        self.names = [f"{name}0" for name in names(len(self.common))]
        self.own_shape = list(shape)

    @classmethod
    def of(cls, call: Call) -> _Indices | None:
        indices = call["indices"]
        found = [info for info in indices if info is not None]
        if not found or any(is_bool(info) for info in found):
            return None
        return cls(call["self"].shape, indices)

    @property
    def result(self) -> list[str]:
        """The dims of `self[indices]`; the indexed ones come first where they are not side by side."""
        return self._replace(self.dims, self.names)

    @property
    def shape(self) -> list[int]:
        return self._replace(self.own_shape, self.common)

    def terms(self) -> list[str]:
        """One term per index."""
        return [term(broadcast(info.shape, self.common, self.names)) for info in self.given]

    def _replace(self, of_self: Sequence, of_indices: Sequence) -> list:
        first, last = self.indexed[0], self.indexed[-1]
        begin = first if last - first + 1 == len(self.indexed) else 0
        left = [value for i, value in enumerate(of_self) if i not in self.indexed]
        return [*left[:begin], *of_indices, *left[begin:]]


def index_add(call: Call) -> str:
    """Parts of `source` are added along one dim; they may be split, which gives partial sums."""
    if not call["self"].shape:
        return f"+(), {term([WHOLE] * len(call['index'].shape))}, ~() -> ()"
    dims, dim = names(len(call["self"].shape)), dim_of(call)
    kept, added = term(whole_at(dims, [dim])), term(dims)
    picked = dims[dim] if call["index"].shape else "()"
    return f"+{kept}, {picked}, ~{added} -> {kept}"


def scatter(call: Call) -> str:
    """Elements placed along one dim by an index; dims where the index is shorter stay whole."""
    ndim, dim, index = len(call["self"].shape), dim_of(call), call["index"].shape
    source = call.arguments.get("src")
    shapes = [call["self"].shape, *([source.shape] if source is not None else [])]
    short = [i for i in range(ndim) if i != dim and any(shape[i] != index[i] for shape in shapes)]
    dims = whole_at(names(ndim), [*short, dim])
    if source is None:
        return rule([term(dims, "" if call["value"] else _mark_of(call["self"])), term(dims)], [term(dims)])
    marks = ("", "") if any(map(is_bool, call.inputs)) else ("~", "+")
    return rule([term(dims, marks[0]), term(dims), term(dims, marks[1])], [term(dims)])


def scatter_add(call: Call) -> str:
    """Elements added along one dim by an index; they may be split along it, which gives partial sums."""
    ndim, dim = len(call["self"].shape), dim_of(call)
    own, index, source = (call[name].shape for name in ("self", "index", "src"))
    short = [i for i in range(ndim) if i != dim and not own[i] == index[i] == source[i]]
    dims = whole_at(names(ndim), short)
    kept = term(whole_at(dims, [dim]))
    placed = term(dims if index[dim] == source[dim] else whole_at(dims, [dim]))
    return f"+{kept}, {placed}, ~{placed} -> {kept}"


def scatter_reduce(call: Call) -> str:
    """Elements joined along one dim with those that an index brings there."""
    if call["reduce"] == "sum" and call["include_self"]:
        return scatter_add(call)
    ndim, dim, index = len(call["self"].shape), dim_of(call), call["index"].shape
    short = [i for i in range(ndim) if i != dim and not call["self"].shape[i] == index[i] == call["src"].shape[i]]
    dims = term(whole_at(names(ndim), [*short, dim]))
    marks = ("~", "+") if call["reduce"] in ("sum", "mean") else ("", "")
    if call["reduce"] == "prod" and call["include_self"]:
        marks = ("~", "")
    return f"{marks[0]}{dims}, {dims}, {marks[1]}{dims} -> {dims}"


def index_copy(call: Call) -> str:
    """Places of one dim replaced by those of `source`."""
    dims = term(whole_at(names(len(call["self"].shape)), [dim_of(call)]))
    marks = ("", "") if is_bool(call["self"]) else ("~", "+")
    source = dims if call["source"].shape else "()"
    return f"{marks[0]}{dims}, {WHOLE if call['index'].shape else '()'}, {marks[1]}{source} -> {dims}"


def index_fill(call: Call) -> str:
    """Places of one dim replaced by one number; linear if that is zero, or partial, too."""
    dims, value = term(whole_at(names(len(call["self"].shape)), [dim_of(call)])), call["value"]
    index = WHOLE if call["index"].shape else "()"
    if isinstance(value, TensorInfo):
        marks = ("", "") if is_bool(call["self"]) else ("~", "+")
        return f"{marks[0]}{dims}, {index}, {marks[1]}() -> {dims}"
    return f"{'' if value else _mark_of(call['self'])}{dims}, {index} -> {dims}"


def take(call: Call) -> str:
    """Elements of the flattened tensor."""
    index = term(names(len(call["index"].shape)))
    return f"{_mark_of(call['self'])}{term([WHOLE] * len(call['self'].shape))}, {index} -> {index}"


def select_scatter(call: Call) -> str:
    """One place of a dim replaced."""
    dims, dim = names(len(call["self"].shape)), dim_of(call)
    kept = whole_at(dims, [dim])
    return rule([term(kept, mark(call, "+")), term([*dims[:dim], *dims[dim + 1 :]], mark(call, "+"))], [term(kept)])


def diagonal_scatter(call: Call) -> str:
    """The diagonal of two dims replaced."""
    ndim = len(call["self"].shape)
    dims, gone = names(ndim), {positive(call[name], ndim) for name in ("dim1", "dim2")}
    kept = term(whole_at(dims, gone))
    diagonal = term([*(name for i, name in enumerate(dims) if i not in gone), WHOLE])
    return f"{mark(call, '+')}{kept}, {mark(call, '+')}{diagonal} -> {kept}"


def index_reduce(call: Call) -> str:
    """Places of one dim joined with those of `source`."""
    dims = term(whole_at(names(len(call["self"].shape)), [dim_of(call)]))
    marks = ("~", "+") if call["reduce"] == "mean" else ("~", "") if call["include_self"] else ("", "")
    marks = marks if call["reduce"] in ("mean", "prod") else ("", "")
    return f"{marks[0]}{dims}, {WHOLE}, {marks[1]}{dims} -> {dims}"


def slice_scatter(call: Call) -> str:
    """A range of a dim replaced, or all of it."""
    if call["self"].shape == call["src"].shape:
        dims = term(names(len(call["self"].shape)))
        return f"{dims}, {mark(call)}{dims} -> {dims}"
    dims = whole_at(names(len(call["self"].shape)), [dim_of(call)])
    return rule([term(dims, mark(call, "+"))] * 2, [term(dims)])


def meshgrid(call: Call) -> str:
    """One dim per tensor, the first two exchanged for "xy"."""
    dims = names(len(call.inputs))
    output = [dims[1], dims[0], *dims[2:]] if call.arguments.get("indexing") == "xy" and len(dims) > 1 else dims
    terms = [
        term([name] if info.shape else ["1"], mark(call, "+")) for name, info in zip(dims, call.inputs, strict=True)
    ]
    return rule(terms, [term(output)] * len(call.outputs))


def masked_scatter(call: Call) -> str:
    """The masked elements replaced, in order, by those of `source`: everything stays whole."""
    own, mask, source = (term([WHOLE] * len(call[name].shape)) for name in ("self", "mask", "source"))
    return f"~{own}, {mask}, +{source} -> {own}"


def one_hot(call: Call) -> Answer:
    """A new last dim with a one at the place of each class."""
    return None if call["num_classes"] < 0 else "... -> ... _"


def _flipped() -> Callable[[Call], str]:
    def entry(call: Call) -> str:
        ndim = len(call.inputs[0].shape)
        dims = whole_at(names(ndim), dims_of(call["dims"], ndim))
        return rule([term(dims, mark(call))], [term(dims)])

    return entry


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.slice.Tensor: slice_,
    **dict.fromkeys(
        (
            aten.narrow.default,
            aten.chunk.default,
            aten.split.Tensor,
            aten.split.sizes,
            aten.split_with_sizes.default,
            aten.unsafe_split.Tensor,
            aten.unsafe_split_with_sizes.default,
        ),
        cut,
    ),
    aten.select.int: pick,
    aten.unbind.int: pick,
    aten.cat.default: cat,
    aten.concat.default: cat,
    aten.stack.default: stack,
    aten.constant_pad_nd.default: pad,
    aten.pad.default: pad,
    aten.flip.default: _flipped(),
    aten.roll.default: roll,
    aten.tril.default: triangle,
    aten.triu.default: triangle,
    aten.gather.default: gather,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
    aten.index_put.default: index_put,
    aten.index_add.default: index_add,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter_add,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.take.default: take,
    aten.index_reduce.default: index_reduce,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.select_scatter.default: select_scatter,
    aten.slice_scatter.default: slice_scatter,
    aten.meshgrid.default: meshgrid,
    aten.meshgrid.indexing: meshgrid,
    aten.masked_scatter.default: masked_scatter,
    aten.one_hot.default: one_hot,
}
