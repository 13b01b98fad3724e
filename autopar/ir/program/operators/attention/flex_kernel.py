"""Attention under a mask of vectors by the kernel of `torch.nn.attention.flex_attention`, for a GPU.

One kernel takes all blocks that a mask leaves. Which those are follows from bounds of the vectors within blocks, as in
`masked_blocks`, here for each sample and head; the device works it out once for all layers of a batch, and the host
waits for nothing. The mask of an element is Python made from the text of the expression, which `torch.compile` puts
into the kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._triton import has_triton

from autopar.ir.program.operators.attention.expressions import (
    Bounds,
    Call,
    Expression,
    Score,
    UnboundedError,
    Vector,
    bounds,
    parse,
    reads_scores,
)
from autopar.ir.program.operators.attention.masked_blocks import bounds_of

BLOCK = 128
"""Queries, and keys, of a block, as the kernel has them by default."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_FEATURES = 16
"""Least features of a head that the kernel takes."""
INDICES = ("j", "i", "h", "b")
"""Indices of key, query, head and sample: the dims of scores from the right."""
KEPT = 4
"""Number of block masks that are kept: as many as kinds of layers have in one batch."""


def takes(q: Tensor, v: Tensor) -> bool:
    """Return whether the kernel runs here: on a GPU, not inside of a graph that is compiled as a whole."""
    on_gpu = q.is_cuda and not isinstance(q, FakeTensor)
    fits = q.dtype in DTYPES and q.dtype == v.dtype and min(q.shape[-1], v.shape[-1]) >= LEAST_FEATURES
    return on_gpu and fits and not torch.compiler.is_compiling() and has_triton()


def attention(q: Tensor, k: Tensor, v: Tensor, vectors: Sequence[Tensor], mask: str, scale: float) -> Tensor:
    """Return attention under a mask, as `attention_by_mask` does."""
    found = mask_of(mask, vectors, q.shape[2], k.shape[2])
    shared = q.shape[1] != k.shape[1]
    return _compiled()(q, k, v, found.score_mod, found.blocks, scale, shared)  # type: ignore[return-value]


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class FlexMask:
    """A mask in the words of flex_attention, and what it was made for."""

    text: str
    vectors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    sizes: tuple[int, int]
    blocks: BlockMask
    score_mod: Callable[..., Tensor] | None

    def is_for(self, text: str, vectors: Sequence[Tensor], sizes: tuple[int, int]) -> bool:
        """Return whether it is the mask of these very tensors, which nothing has written into since."""
        return (
            (text, sizes) == (self.text, self.sizes)
            and len(vectors) == len(self.vectors)
            and all(one is other for one, other in zip(vectors, self.vectors, strict=True))
            and tuple(x._version for x in vectors) == self.versions
        )


_recent: list[FlexMask] = []


def mask_of(text: str, vectors: Sequence[Tensor], num_queries: int, num_keys: int) -> FlexMask:
    """Return the mask of a batch, made by the first layer that has it."""
    sizes = num_queries, num_keys
    for known in _recent:
        if known.is_for(text, vectors, sizes):
            return known
    made = _made(text, tuple(vectors), sizes)
    _recent.insert(0, made)
    del _recent[KEPT:]
    return made


@torch.no_grad()
def _made(text: str, vectors: tuple[Tensor, ...], sizes: tuple[int, int]) -> FlexMask:
    expression = parse(text)
    visible, seen, truths = _blocks(expression, vectors, sizes)
    function = functions(text, tuple(tuple(x.shape) for x in vectors), truths)(*vectors)
    partial, full = (visible & ~seen, visible & seen) if truths else (visible, torch.zeros_like(visible))
    blocks = BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=function if truths else None,
        seq_lengths=sizes,
    )
    versions = tuple(x._version for x in vectors)
    return FlexMask(text, vectors, versions, sizes, blocks, None if truths else function)


def _blocks(expression: Expression, vectors: Sequence[Tensor], sizes: tuple[int, int]) -> tuple[Tensor, Tensor, bool]:
    """Return which blocks [samples, heads, queries, keys] may be seen, and are wholly seen; and if by truth values."""
    within: list[Bounds] = [bounds_of(x, BLOCK, BLOCK) for x in vectors]
    shape = tuple(math.ceil(size / BLOCK) for size in sizes)
    truths = _is_of_truths(expression, vectors)
    try:
        low, high = bounds(expression, within)
        visible, seen = (high, low) if truths else (high != -math.inf, torch.zeros_like(low, dtype=torch.bool))
    except UnboundedError:
        visible = torch.ones((), dtype=torch.bool, device=vectors[0].device)
        seen = ~visible
    return _in_four_dims(visible, shape), _in_four_dims(seen, shape), truths


def _is_of_truths(expression: Expression, vectors: Sequence[Tensor]) -> bool:
    """Return whether an expression says which keys are seen, and not what is added or what scores become."""
    if reads_scores(expression):
        return False
    one = [x[(slice(0, 1),) * x.ndim] for x in vectors]
    return functions(str(expression), tuple(tuple(x.shape) for x in one), True)(*one)(0, 0, 0, 0).dtype is torch.bool


def _in_four_dims(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    leading = blocks.shape[:-2]
    return blocks.expand(*leading, *shape).reshape((1,) * (2 - len(leading)) + (*leading, *shape))


def _ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which, those first."""
    return dense.sum(-1, dtype=torch.int32), dense.int().argsort(dim=-1, descending=True, stable=True).int()


@functools.lru_cache(maxsize=256)
def functions(text: str, shapes: tuple[tuple[int, ...], ...], truths: bool) -> Callable[..., Callable[..., Tensor]]:
    """Return what makes a mask_mod (of truth values) or a score_mod of vectors of these shapes.

    >>> functions("le(v1, v0)", ((4, 1), (4,)), True)(torch.arange(4)[:, None], torch.arange(4))(0, 0, 2, 3)
    tensor(False)
    """
    expression = parse(text)
    body = _source(expression, shapes)
    if not truths and not reads_scores(expression):
        body = f"score + {body}"
    arguments = ", ".join(("b", "h", "i", "j") if truths else ("score", "b", "h", "i", "j"))
    names = ", ".join(f"v{number}" for number in range(len(shapes)))
    source = f"def make({names}):\n    def modify({arguments}):\n        return {body}\n    return modify\n"
    namespace: dict[str, Any] = {"torch": torch, "inf": math.inf}
    exec(source, namespace)
    return namespace["make"]


def _source(expression: Any, shapes: Sequence[tuple[int, ...]]) -> str:
    """Return the Python of an expression for one element of the scores."""
    if isinstance(expression, Score):
        return "score"
    if isinstance(expression, Vector):
        shape = shapes[expression.number]
        indices = [INDICES[place] if size > 1 else "0" for place, size in enumerate(reversed(shape))]
        return f"{expression}[{', '.join(reversed(indices)) or '()'}]"
    if isinstance(expression, Call):
        given = [_source(each, shapes) for each in expression.arguments]
        return (
            f"{given[0]}.to({given[1]})" if expression.name == "to" else f"torch.{expression.name}({', '.join(given)})"
        )
    return str(expression)
