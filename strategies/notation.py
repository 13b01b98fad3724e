"""Rule texts made from shapes: names for dims, terms, and the rule of an operation that keeps its dims in place.

Names avoid o, k and x, which would give a dim the role of a column, a row or an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE

Answer = str | OpRule | None
"""Answer of a table for a call: a rule's text, an `OpRule`, or None if no rule fits."""
Entry = str | OpRule | Callable[[Call], Answer]

LETTERS = "abcdefghijlmnpqrstuvwyz"


def names(count: int) -> list[str]:
    """Return the names for `count` dims: a, b, c …"""
    return [LETTERS[i] if i < len(LETTERS) else f"a{i}" for i in range(count)]


def batch_names(count: int) -> list[str]:
    """Return the names for `count` batch dims, unlike all of one letter: a0, b0, c0 …"""
    return [f"{name}0" for name in names(count)]


def term(dims: Iterable[str], mark: str = "") -> str:
    """Return a term's text.

    >>> term(["a", "(h d)"], "~"), term([])
    ('~a (h d)', '()')
    """
    return mark + (" ".join(dims) or "()")


def rule(inputs: Iterable[str], outputs: Iterable[str]) -> str:
    """Return a rule's text from those of its terms."""
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def dim_of(call: Call, name: str = "dim", ndim: int | None = None) -> int:
    """Return the argument `name`, counted from 0; `ndim` defaults to that of the first input."""
    return positive(call[name], len(call.inputs[0].shape) if ndim is None else ndim)


def positive(dim: int, ndim: int) -> int:
    """Return a dim counted from 0."""
    return dim % max(ndim, 1)


def dims_of(dims: int | Sequence[int] | None, ndim: int) -> frozenset[int]:
    """Return the dims that an operation works along; none named means all."""
    if dims is None or dims == [] or dims == ():
        return frozenset(range(ndim))
    return frozenset(positive(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims))


def whole_at(dims: Sequence[str], whole: Iterable[int]) -> list[str]:
    """Return the dims with `_` at the places named."""
    places = set(whole)
    return [WHOLE if i in places else dim for i, dim in enumerate(dims)]


def all_whole(call: Call) -> str:
    """Return the rule that splits nothing, without a remark in the report that none was found."""
    terms = ([term([WHOLE] * len(info.shape)) for info in infos] for infos in (call.inputs, call.outputs))
    return rule(*terms)


def broadcast(shape: Sequence[int], against: Sequence[int], dims: Sequence[str]) -> list[str]:
    """Return the dims of a tensor that is broadcast to the shape `against`, whose dims are called `dims`.

    >>> broadcast((1, 3), (5, 4, 3), ["a", "b", "c"])
    ['1', 'c']
    """
    offset = len(against) - len(shape)
    assert offset >= 0, f"{list(shape)} is not broadcast to {list(against)}"
    return ["1" if size == 1 and against[offset + i] != 1 else dims[offset + i] for i, size in enumerate(shape)]


def tensor_arguments(call: Call) -> Iterator[tuple[str, TensorInfo]]:
    """Name and tensor of every argument that is a single tensor, in the order of the schema."""
    for name, value in call.arguments.items():
        if isinstance(value, TensorInfo):
            yield name, value


def is_bool(info: object) -> bool:
    """Return whether an argument is a tensor of truth values, which cannot be partial."""
    return isinstance(info, TensorInfo) and info.dtype is torch.bool


def marks_of(call: Call, linear: Mapping[str, str]) -> dict[str, str]:
    """Return the marks that hold for this call of those that hold when all marked arguments are tensors of numbers.

    A number in the place of an added tensor makes the operation affine: no mark is left.
    """
    added = [name for name, mark in linear.items() if mark == "+"]
    if any(not isinstance(call[name], TensorInfo) or is_bool(call[name]) for name in added):
        return {}
    if any(map(is_bool, call.outputs)):
        return {}
    return {name: mark for name, mark in linear.items() if not is_bool(call[name])}


def pointwise(**linear: str) -> Callable[[Call], str]:
    """Return the rule of an operation on single elements, its inputs broadcast to its output.

    `linear` gives the mark of each argument, for example `self="~"`.
    """

    def entry(call: Call) -> str:
        output = call.outputs[0].shape
        dims = names(len(output))
        marks = marks_of(call, linear)
        terms = [
            term(broadcast(info.shape, output, dims), marks.get(name, "")) for name, info in tensor_arguments(call)
        ]
        return rule(terms, [term(dims)] * len(call.outputs))

    return entry


def along_dims(argument: str = "dim", mark: str = "") -> Callable[[Call], str]:
    """Return the rule of an operation that mixes the elements along some dims and keeps all dims in place."""

    def entry(call: Call) -> str:
        ndim = len(call.inputs[0].shape)
        dims = whole_at(names(ndim), dims_of(call[argument], ndim))
        return rule([term(dims, "" if is_bool(call.inputs[0]) else mark)], [term(dims)] * len(call.outputs))

    return entry
