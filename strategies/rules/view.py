"""Operations that give the same elements another shape or order. All of them are linear.

A reshape keeps its factors: dims whose sizes have the same product are one group, (b, s, h·d) → (b, s, h, d) is
"a b (c d) -> a b c d", and a group splits along its outermost factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from autopar.errors import RuleError
from autopar.ir.sharding.constraint import CONSTRAIN
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE, Rule
from autopar.strategies.notation import (
    Entry,
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


def linear_mark(call: Call) -> str:
    """The mark of an operation that is linear in each of its tensors alone, or in none if they are bool."""
    return "" if any(map(is_bool, call.inputs)) else "~"


def reshaped(source: Sequence[int], target: Sequence[int]) -> tuple[list[str], list[str]]:
    """The dims of both sides of a reshape.

    >>> reshaped((2, 3, 20), (6, 4, 5))
    (['a', 'b', '(c d)'], ['(a b)', 'c', 'd'])
    """
    if 0 in source:
        return [WHOLE] * len(source), [WHOLE] * len(target)
    # Ends of dims, in elements from the outermost: the ends of both sides bound the factors.
    ends = sorted({*accumulate(source, _times), *accumulate(target, _times)} - {1})
    cuts = [1, *ends[:-1]]
    divides = [after % before == 0 for before, after in zip(cuts, ends, strict=False)]
    factor_at = dict(zip(cuts, names(len(cuts)), strict=True))
    sides = tuple(_grouped(shape, cuts, divides, factor_at) for shape in (source, target))
    return _without_strays(sides, source, target)


def _times(left: int, right: int) -> int:
    return left * right


def _grouped(
    shape: Sequence[int], cuts: Sequence[int], divides: Sequence[bool], factor_at: dict[int, str]
) -> list[list[str]]:
    """The factors of every dim; none for a dim of size one, `_` for one whose cuts do not divide each other."""
    dims: list[list[str]] = []
    begin = 1
    for size in shape:
        end = begin * size
        inside = [i for i, cut in enumerate(cuts) if begin <= cut < end]
        whole = not all(divides[i] for i in inside)
        dims.append([WHOLE] if whole else [factor_at[cuts[i]] for i in inside])
        begin = end
    return dims


def _without_strays(
    sides: tuple[list[list[str]], ...], source: Sequence[int], target: Sequence[int]
) -> tuple[list[str], list[str]]:
    """The sides as texts, where a dim with a factor that the other side lacks (next to a whole dim) is whole."""
    left, right = (list(side) for side in sides)
    # A group that becomes whole takes all its factors from its side, which may leave new strays on the other.
    while strays := ({name for dim in left for name in dim} ^ {name for dim in right for name in dim}) - {WHOLE}:
        left, right = ([[WHOLE] if strays & set(dim) else dim for dim in side] for side in (left, right))
    texts = [_group(dim) for dim in left], [_group(dim) for dim in right]
    try:
        Rule.parse(rule([term(texts[0])], [term(texts[1])])).bind([source], [target])
    except RuleError:
        return [WHOLE] * len(source), [WHOLE] * len(target)
    return texts


def _group(factors: list[str]) -> str:
    """A dim's text: of one factor, of several, or of none."""
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def reshape(shape_argument: int | None) -> Callable[[Call], OpRule]:
    """A reshape that states its shape at this position, or not at all."""

    def entry(call: Call) -> OpRule:
        left, right = reshaped(call.inputs[0].shape, call.outputs[0].shape)
        return OpRule(rule([term(left, linear_mark(call))], [term(right)]), shape_argument=shape_argument)

    return entry


def view_as(call: Call) -> str:
    """A reshape to the shape of a second tensor."""
    left, right = reshaped(call.inputs[0].shape, call.outputs[0].shape)
    return rule([term(left, linear_mark(call)), term(right)], [term(right)])


def unflatten(call: Call) -> str:
    """One dim becomes several; their stated sizes are global, so only a dim left to be found (-1) may be split."""
    ndim = len(call.inputs[0].shape)
    dim, sizes = dim_of(call), call["sizes"]
    dims = names(ndim)
    if sizes[0] == -1:
        inner = [f"{dims[dim]}{i}" for i in range(len(sizes) - 1)]
        left, right = f"({' '.join([dims[dim], *inner])})", [dims[dim], *inner]
        if not inner:
            left = dims[dim]
    else:
        left, right = WHOLE, [WHOLE] * len(sizes)
    return rule(
        [term([*dims[:dim], left, *dims[dim + 1 :]], linear_mark(call))],
        [term([*dims[:dim], *right, *dims[dim + 1 :]])],
    )


def expand(call: Call) -> OpRule:
    """Dims of size one repeated, new dims before all others: factors that only the output has."""
    return OpRule(_expanded(call), shape_argument=1)


def expand_as(call: Call) -> str:
    """Return the rule of `expand` to the shape of a second tensor, which is split like the output."""
    left, right = _expanded(call).split(" -> ")
    return f"{left}, {right} -> {right}"


def _expanded(call: Call) -> str:
    output = call.outputs[0].shape
    dims = names(len(output))
    return rule([term(broadcast(call.inputs[0].shape, output, dims), linear_mark(call))], [term(dims)])


def broadcast_tensors(call: Call) -> str:
    """All tensors expanded to their common shape."""
    output = call.outputs[0].shape
    dims = names(len(output))
    mark = "+" if linear_mark(call) else ""
    terms = [term(broadcast(info.shape, output, dims), mark) for info in call.inputs]
    return rule(terms, [term(dims)] * len(call.outputs))


def reordered(order: Callable[[Call, int], Iterable[int]]) -> Callable[[Call], str]:
    """A permutation: `order` gives, for a call and its rank, the input dim of every output dim."""

    def entry(call: Call) -> str:
        dims = names(len(call.inputs[0].shape))
        moved = [dims[i] for i in order(call, len(dims))]
        return rule([term(dims, linear_mark(call))], [term(moved)])

    return entry


def _permuted(call: Call, ndim: int) -> list[int]:
    return [positive(dim, ndim) for dim in call["dims"]]


def _swapped(first: str, second: str) -> Callable[[Call, int], list[int]]:
    def order(call: Call, ndim: int) -> list[int]:
        i, j = positive(call[first], ndim), positive(call[second], ndim)
        return [j if dim == i else i if dim == j else dim for dim in range(ndim)]

    return order


def _last_two(call: Call, ndim: int) -> list[int]:
    return [*range(ndim - 2), *reversed(range(max(ndim - 2, 0), ndim))]


def _reversed(call: Call, ndim: int) -> list[int]:
    return list(reversed(range(ndim)))


def _moved(call: Call, ndim: int) -> list[int]:
    """The named dims at their new places, the others in order between them."""
    source, destination = ([dims] if isinstance(dims, int) else dims for dims in (call["source"], call["destination"]))
    moved = {positive(to, ndim): positive(dim, ndim) for dim, to in zip(source, destination, strict=True)}
    others = iter(dim for dim in range(ndim) if dim not in moved.values())
    return [moved[place] if place in moved else next(others) for place in range(ndim)]


def unsqueeze(call: Call) -> str:
    """A new dim of size one."""
    dims = names(len(call.inputs[0].shape))
    dim = positive(call["dim"], len(dims) + 1)
    return rule([term(dims, linear_mark(call))], [term([*dims[:dim], "1", *dims[dim:]])])


def squeeze(argument: str | None) -> Callable[[Call], str]:
    """Return a rule without dims of size one; a dim named in the call stays whole, as its part might have size one."""

    def entry(call: Call) -> str:
        shape = call.inputs[0].shape
        requested = dims_of(call[argument], len(shape)) if argument else frozenset(range(len(shape)))
        dims = [
            "1" if size == 1 else WHOLE if i in requested else name
            for i, (size, name) in enumerate(zip(shape, names(len(shape)), strict=True))
        ]
        kept = [name for i, name in enumerate(dims) if not (i in requested and name == "1")]
        return rule([term(dims, linear_mark(call))], [term(kept)])

    return entry


def repeat(call: Call) -> str:
    """Tiles: the repetitions are the outer factor of a dim, so that only a dim that is not repeated may be split."""
    shape, repeats = call.inputs[0].shape, call["repeats"]
    num_new = len(repeats) - len(shape)
    dims = [name if repeats[num_new + i] == 1 else WHOLE for i, name in enumerate(names(len(shape)))]
    return rule([term(dims, linear_mark(call))], [term([WHOLE] * num_new + dims)])


def repeat_interleave(call: Call) -> str:
    """Every element several times in a row: the repetitions are the inner factor of the dim, or of all, flattened."""
    dims = names(len(call.inputs[0].shape))
    if call["dim"] is None:
        left = dims if call["output_size"] is None else [WHOLE] * len(dims)
        flat = f"({' '.join([*dims, 'r0'])})" if call["output_size"] is None else WHOLE
        return rule([term(left, linear_mark(call))], [term([flat])])
    dim = dim_of(call)
    repeated = [*dims[:dim], f"({dims[dim]} r0)", *dims[dim + 1 :]]
    if call["output_size"] is not None:
        dims[dim] = repeated[dim] = WHOLE
    return rule([term(dims, linear_mark(call))], [term(repeated)])


def diagonal(call: Call) -> str:
    """The diagonal of two dims becomes the last dim."""
    ndim = len(call.inputs[0].shape)
    gone = (positive(call["dim1"], ndim), positive(call["dim2"], ndim))
    dims = names(ndim)
    kept = [name for i, name in enumerate(dims) if i not in gone]
    whole = [WHOLE if i in gone else name for i, name in enumerate(dims)]
    return rule([term(whole, linear_mark(call))], [term([*kept, WHOLE])])


def diag_embed(call: Call) -> str:
    """The last dim becomes the diagonal of two new ones."""
    ndim = len(call.outputs[0].shape)
    new = (positive(call["dim1"], ndim), positive(call["dim2"], ndim))
    batch = names(ndim - 2)
    kept = iter(batch)
    placed = [WHOLE if i in new else next(kept) for i in range(ndim)]
    return rule([term([*batch, WHOLE], linear_mark(call))], [term(placed)])


def rot90(call: Call) -> str:
    """Two dims turned."""
    ndim = len(call.inputs[0].shape)
    dims = term(whole_at(names(ndim), dims_of(call["dims"], ndim)))
    return rule([f"{linear_mark(call)}{dims}"], [dims])


def unfold(call: Call) -> str:
    """Windows of one dim become a new last dim; the dim is free where they neither overlap nor leave a rest."""
    shape = call.inputs[0].shape
    left = names(len(shape))
    right, dim = [*left, WHOLE], dim_of(call, "dimension")
    if call["size"] == call["step"] and shape[dim] % call["size"] == 0:
        left[dim] = f"({left[dim]} {left[dim]}0)"
    else:
        left[dim] = right[dim] = WHOLE
    return rule([term(left, linear_mark(call))], [term(right)])


RULES: dict[torch._ops.OpOverload, Entry] = {
    CONSTRAIN: "~... -> ...",
    **dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_copy.default), reshape(1)
    ),
    aten.flatten.using_ints: reshape(None),
    aten.unflatten.int: unflatten,
    aten.view_as.default: view_as,
    aten.reshape_as.default: view_as,
    aten.expand.default: expand,
    aten.broadcast_to.default: expand,
    aten.expand_as.default: expand_as,
    aten.broadcast_tensors.default: broadcast_tensors,
    aten.permute.default: reordered(_permuted),
    aten.transpose.int: reordered(_swapped("dim0", "dim1")),
    aten.swapaxes.default: reordered(_swapped("axis0", "axis1")),
    aten.swapdims.default: reordered(_swapped("dim0", "dim1")),
    **dict.fromkeys((aten.t.default, aten.mT.default, aten.adjoint.default), reordered(_last_two)),
    aten.numpy_T.default: reordered(_reversed),
    aten.movedim.int: reordered(_moved),
    aten.movedim.intlist: reordered(_moved),
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.dim: squeeze("dim"),
    aten.squeeze.dims: squeeze("dim"),
    aten.squeeze.default: squeeze(None),
    aten.repeat.default: repeat,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.diagonal.default: diagonal,
    aten.diagonal_copy.default: diagonal,
    aten.diag_embed.default: diag_embed,
    aten.rot90.default: rot90,
    aten.unfold.default: unfold,
    aten.view_as_real.default: "~... -> ... _",
    aten.view_as_complex.default: "~... _ -> ...",
}
