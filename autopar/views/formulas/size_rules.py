"""Effects of operations on dims that their rules call whole: joins, cuts, margins, and attention's sequences.

Slices are related if all slices of a dim are known (see `symbolic_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call
from autopar.views.formulas.equations import Equation, Equations

Dims = Sequence[Sequence[int]]
"""A variable per dim of every tensor."""
SizeRule = Callable[[Equations, Call, Dims, Dims, str], None]
"""(equations, call, dims of its inputs, dims of its outputs, name for errors) adds equations."""


def padded(equations: Equations, call: Call, inputs: Dims, outputs: Dims, where: str) -> None:
    """State that dims are what they were plus their current margins."""
    for before, after in zip(inputs[0], outputs[0], strict=True):
        equations.add(Equation(after, (before,), False, equations.numbers[after] - equations.numbers[before], where))


def joined(equations: Equations, call: Call, inputs: Dims, outputs: Dims, where: str) -> None:
    """Add the sizes along one dim."""
    dim = call["dim"] % len(outputs[0])
    equal_rank = [dims for dims in inputs if len(dims) == len(outputs[0])]
    equations.add(Equation(outputs[0][dim], tuple(dims[dim] for dims in equal_rank), False, 0, where))


def cut(equations: Equations, call: Call, inputs: Dims, outputs: Dims, where: str) -> None:
    """State that the sizes of the slices along one dim add up to the whole."""
    dim = call["dim"] % len(inputs[0])
    pieces = tuple(dims[dim] for dims in outputs)
    if sum(equations.numbers[piece] for piece in pieces) == equations.numbers[inputs[0][dim]]:
        equations.add(Equation(inputs[0][dim], pieces, False, 0, where))


def attended(equations: Equations, call: Call, inputs: Dims, outputs: Dims, where: str) -> None:
    """Relate queries (s, d), keys (t, d), values (t, e), a mask (s, t) and outputs (s, e)."""
    mask = call["attn_mask"]
    masks = inputs[3:4] if isinstance(mask, TensorInfo) and len(mask.shape) > 1 else ()
    _attended(equations, inputs, outputs, [("st", dims) for dims in masks], where)


def attended_by_mask(equations: Equations, call: Call, inputs: Dims, outputs: Dims, where: str) -> None:
    """Relate sizes like `attended`, with vectors of keys (…, t) and of queries (…, s, 1) instead of a mask.

    The sinks follow these vectors.
    """
    vectors = [(dims, info.shape[-2:]) for dims, info in zip(inputs[3:], call["vectors"], strict=False)]
    named = [("t", dims) for dims, shape in vectors if shape and shape[-1] > 1]
    named += [("s1", dims) for dims, shape in vectors if len(shape) > 1 and shape[-1] == 1 and shape[0] > 1]
    _attended(equations, inputs, outputs, named, where)


def _attended(
    equations: Equations, inputs: Dims, outputs: Dims, masks: Iterable[tuple[str, Sequence[int]]], where: str
) -> None:
    """Relate the last dims of queries, keys, values, outputs and masks by their names."""
    named = [*zip(("sd", "td", "te"), inputs, strict=False), ("se", outputs[0]), *masks]
    equations.equate((each for names, dims in named for each in zip(names, dims[-len(names) :], strict=True)), where)


def unrelated(equations: Equations, call: Call, inputs: Dims, outputs: Dims, where: str) -> None:
    """Relate nothing: whole dims of one size need not be the same dim."""


SIZE_RULES: dict[str, SizeRule] = {
    "constant_pad_nd": padded,
    "pad": padded,
    "cat": joined,
    "concat": joined,
    "split": cut,
    "split_with_sizes": cut,
    "chunk": cut,
    "scaled_dot_product_attention": attended,
    "attention_by_mask": attended_by_mask,
    **dict.fromkeys(("slice", "index", "index_put", "gather", "stack", "unbind", "select"), unrelated),
}
"""Size rules by operation name; whole dims of all other operations are equal at the same position (see the walk)."""
