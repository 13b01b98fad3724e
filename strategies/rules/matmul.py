"""Matrix products. A factor k is contracted (rows of a weight), o is a column of a weight, n a dim of an activation."""

from __future__ import annotations

import math

import torch

from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import (
    Answer,
    Entry,
    batch_names,
    broadcast,
    names,
    positive,
    rule,
    tensor_arguments,
    term,
)
from autopar.strategies.rules.products.chunked import in_chunks
from autopar.strategies.rules.products.tiled import in_tiles

aten = torch.ops.aten


def linear(call: Call) -> OpRule | str:
    """`input @ weight.T + bias`; a weight of one dim gives a number per row."""
    if len(call["weight"].shape) == 1:
        return "~... k, ~k -> ..." if call["bias"] is None else "~... k, ~k, +() -> ..."
    text = "~... k, ~o k -> ... o" if call["bias"] is None else "~... k, ~o k, +o -> ... o"
    return OpRule(text, (*in_chunks(call), *in_tiles(call)))


def matmul(call: Call) -> OpRule | str:
    """A product of any ranks; a second operand of two dims is taken for a weight."""
    left, right = (info.shape for info in call.inputs)
    output = call.outputs[0].shape
    column = "o" if len(right) == 2 else "n"
    row = ["m"] if len(left) > 1 else []
    columns = [column] if len(right) > 1 else []
    num_batch = len(output) - len(row) - len(columns)
    batch = batch_names(num_batch)
    first = broadcast(left[: -len(row) - 1], output[:num_batch], batch)
    second = broadcast(right[: -len(columns) - 1], output[:num_batch], batch)
    terms = [term([*first, *row, "k"], "~"), term([*second, "k", *columns], "~")]
    text = rule(terms, [term([*batch, *row, *columns])])
    return OpRule(text, (*in_chunks(call), *in_tiles(call))) if row and column == "o" else text


def mm(call: Call) -> OpRule:
    """A product of two matrices, of which the second is taken for a weight."""
    return OpRule("~m k, ~k o -> m o", (*in_chunks(call), *in_tiles(call)))


def with_sum(dims: str, product: str) -> Entry:
    """`beta * self + alpha * product`, `self` broadcast to `dims`."""

    def entry(call: Call) -> str:
        output = call.outputs[0].shape
        added = term(broadcast(call.inputs[0].shape, output, dims.split()), "+")
        return f"{added}, {product} -> {dims}"

    return entry


def einsum(call: Call) -> Answer:
    """Any einsum without a repeated index in one operand; its letters become factors without a role."""
    left, _, right = call["equation"].replace(" ", "").partition("->")
    operands = left.split(",")
    if "->" not in call["equation"]:
        letters = left.replace(",", "").replace(".", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    texts = [text.replace("...", ".") for text in (*operands, right)]
    if any(len(set(text)) < len(text) for text in texts):
        return None
    shapes = [info.shape for info in call.inputs]
    num_dots = [len(shape) - len(text) + 1 for text, shape in zip(texts, shapes, strict=False) if "." in text]
    dots = [f"{name}2" for name in names(max(num_dots, default=0))]
    sizes: dict[str, int] = {}
    named = []
    for text, shape in zip(texts, shapes, strict=False):
        named.append(_dims_of_operand(text, len(shape), dots))
        for name, size in zip(named[-1], shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    terms = [
        term(["1" if size < sizes[name] else name for name, size in zip(dims, shape, strict=True)], "~")
        for dims, shape in zip(named, shapes, strict=True)
    ]
    return rule(terms, [term(_dims_of_operand(texts[-1], len(call.outputs[0].shape), dots))])


def _dims_of_operand(text: str, ndim: int, dots: list[str]) -> list[str]:
    """A factor per dim; the dots of an operand are the last of all `dots`."""
    dims: list[str] = []
    for letter in text:
        if letter == ".":
            count = ndim - len(text) + 1
            dims.extend(dots[len(dots) - count :])
        else:
            dims.append(f"{letter}0" if letter.islower() else f"{letter.lower()}1")
    return dims


ROW_BYTES = 16  # aten._grouped_mm needs row strides that are multiples of this
MOST_PARTS = 8  # into how many parts its dims may be split at least: tensor parallelism inside a node


def grouped_mm(call: Call) -> Answer:
    """Tokens sorted by expert times one matrix per expert; the offsets are those of all tokens, which stay whole."""
    tensors = [info for _, info in tensor_arguments(call)]
    left, right = (len(info.shape) for info in tensors[:2])
    if (left, right, len(tensors)) != (2, 3, 3):
        return None
    flops = 2 * math.prod(tensors[0].shape) * tensors[1].shape[-1]
    row_bytes = [size * tensors[1].dtype.itemsize for size in tensors[1].shape[1:]]
    aligned = [num_bytes % (ROW_BYTES * MOST_PARTS) == 0 for num_bytes in row_bytes]
    if call.target is not aten._grouped_mm.default:
        aligned = [True, True]
    k, o = (name if one else WHOLE for name, one in zip("ko", aligned, strict=True))
    return OpRule(f"~_ {k}, ~_ {k} {o}, _ -> _ {o}", flops=flops)


def tensordot(call: Call) -> str:
    """A product summed over pairs of dims; what is left of `other` follows what is left of `self`."""
    left, right = call["self"].shape, call["other"].shape
    pairs = {
        positive(i, len(left)): positive(j, len(right))
        for i, j in zip(call["dims_self"], call["dims_other"], strict=True)
    }
    summed = ["k"] if len(pairs) == 1 else [f"k{i}" for i in range(len(pairs))]
    of_left, of_right = dict(zip(pairs, summed, strict=True)), dict(zip(pairs.values(), summed, strict=True))
    first = [of_left.get(i, name) for i, name in enumerate(names(len(left)))]
    column = ["o"] * len(right) if len(right) == 2 and len(pairs) == 1 else batch_names(len(right))
    second = [of_right.get(i, name) for i, name in enumerate(column)]
    kept = [name for name in (*first, *second) if name not in summed]
    # A dim of size one is broadcast against the one that it meets.
    sizes = {i: max(left[i], right[j]) for i, j in pairs.items()}
    meets = {j: size for (i, j), size in zip(pairs.items(), sizes.values(), strict=True)}
    first = ["1" if left[i] < sizes.get(i, 1) else name for i, name in enumerate(first)]
    second = ["1" if right[j] < meets.get(j, 1) else name for j, name in enumerate(second)]
    return rule([term(first, "~"), term(second, "~")], [term(kept)])


def inner(call: Call) -> str:
    """Products of all vectors of both; with a number, a product."""
    left, right = (len(info.shape) for info in call.inputs)
    if not left or not right:
        dims = [names(left), batch_names(right)]
        return rule([term(dims[0], "~"), term(dims[1], "~")], [term(dims[0] + dims[1])])
    first, second = names(left - 1), batch_names(right - 1)
    return rule([term([*first, "k"], "~"), term([*second, "k"], "~")], [term([*first, *second])])


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.linear.default: linear,
    aten.mm.default: mm,
    aten.bmm.default: "~b m k, ~b k n -> b m n",
    aten.mv.default: "~m k, ~k -> m",
    aten.dot.default: "~k, ~k -> ()",
    aten.outer.default: "~m, ~n -> m n",
    aten.vdot.default: "~k, ~k -> ()",
    aten.addbmm.default: with_sum("m n", "~b m k, ~b k n"),
    aten.addmv.default: with_sum("m", "~m k, ~k"),
    aten.addr.default: with_sum("m n", "~m, ~n"),
    aten.addmm.default: with_sum("m o", "~m k, ~k o"),
    aten.baddbmm.default: with_sum("b m n", "~b m k, ~b k n"),
    aten.matmul.default: matmul,
    aten.einsum.default: einsum,
    aten.tensordot.default: tensordot,
    aten.inner.default: inner,
    aten.bilinear.default: lambda call: f"~... i, ~... j, ~o i j{', +o' if len(call.inputs) == 4 else ''} -> ... o",
    aten._grouped_mm.default: grouped_mm,
}

BY_NAME: dict[str, Entry] = {"transformers.grouped_mm_fallback.default": grouped_mm}
"""Operations of libraries that need not be there, by the name that they print."""
