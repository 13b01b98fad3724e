"""Dropout that draws the same mask for the same piece of a tensor, wherever it lies.

Each draw has its own generator (see `randomness`). The deterministic mode draws the mask of the whole tensor from the
default generator, exactly as one device would, and takes its part: slower, for tests. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed._local_tensor import local_tensor_mode

from autopar.runtime.collectives.axes import Axes, Axis, axes_of, num_parts_of, part_of
from autopar.runtime.collectives.functions import local_slice
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.places import Dealing, Ranks, on_each_rank
from autopar.runtime.implementations.randomness import randomness


def dropout(
    x: Tensor, p: float, train: bool, *, key: int, axes: Axes, sizes: Mapping[str, int], zigzag: Collection[str] = ()
) -> Tensor:
    """As `aten.dropout.default`; the factors of `sizes` are the dims of `x` in order. Moves nothing."""
    return _dropped(x, p if train else 0.0, key, axes, sizes, zigzag)


def attention_with_dropout(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    /,
    *,
    key: int,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Collection[str] = (),
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `aten.scaled_dot_product_attention.default`, by explicit probabilities [..., heads, queries, keys].

    Factors: "h" heads (outermost where query heads share keys: "(h r)"), "q" query heads alone, "s" queries, the
    others are the leading dims in order. Half precision is computed in float32, as PyTorch's own explicit path does.
    Moves nothing.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, value = shared_heads(query, keys, value, axes, sizes)
    if enable_gqa:
        keys, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (keys, value))
    # Both sides take half of the scale, so that their product cannot overflow.
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query.to(wide) * root) @ (keys.to(wide) * root).transpose(-2, -1)
    if is_causal:
        queries = Dealing(axes_of(axes.get("s", ())), "s" in zigzag)
        scores = scores.masked_fill(~_seen_keys(*scores.shape[-2:], queries, scores.device), -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    # Safe: a query that may look at no key gets zeros.
    probabilities = torch.ops.aten._safe_softmax.default(scores, -1)
    leading = [factor for factor in sizes if factor not in ("h", "r", "q", "s")]
    whole = {factor: sizes[factor] for factor in leading[: query.ndim - 3]}
    if query.ndim > 2:
        whole["h"] = sizes["h"] * sizes.get("r", 1)
    whole |= {"s": sizes["s"], "keys": keys.shape[-2]}
    split = {**axes, "h": (*axes.get("h", ()), *axes.get("q", ()))}
    probabilities = _dropped(probabilities, dropout_p, key, split, whole, zigzag)
    return (probabilities @ value.to(wide)).to(query.dtype)


def _seen_keys(num_queries: int, num_keys: int, queries: Dealing, device: torch.device) -> Tensor:
    """Which of all keys each of this rank's queries sees, where none sees what comes behind it: [queries, keys]."""
    size = num_queries * num_parts_of(queries.axes)

    def compute(ranks: Ranks) -> list[Tensor]:
        pieces = queries.pieces(size, ranks)
        positions = torch.cat([torch.arange(piece.first, piece.end, device=device) for piece in pieces])
        return [torch.arange(num_keys, device=device) <= positions.unsqueeze(-1)]

    (seen,) = on_each_rank(compute, queries.axes, ())
    return seen


def _dropped(x: Tensor, p: float, key: int, axes: Axes, sizes: Mapping[str, int], zigzag: Collection[str]) -> Tensor:
    """Zero with probability `p`, else scaled; the factors of `sizes` are the dims in order."""
    if p == 0:
        return x
    split = [axes_of(axes.get(factor, ())) for factor in sizes]
    if randomness().deterministic:
        kept = _kept_of_whole(x, list(sizes.values()), p, split, [factor in zigzag for factor in sizes])
    else:
        kept = _kept(x, p, key, split)
    # Multiplied by a mask of zeros and 1 / (1 - p), bit by bit as PyTorch does it.
    return x * (kept.to(x.dtype).div_(1 - p) if p < 1 else kept.to(x.dtype))


def _kept_of_whole(
    x: Tensor, shape: list[int], p: float, split: Sequence[tuple[Axis, ...]], zigzag: Sequence[bool]
) -> Tensor:
    """This rank's part of what one device would keep of a whole of that shape; of padding nothing is kept."""
    kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    for dim, axes in enumerate(split):
        for axis in axes:
            kept = local_slice(kept, axis, dim, zigzag[dim])
    return kept


def _kept(x: Tensor, p: float, key: int, split: Sequence[tuple[Axis, ...]]) -> Tensor:
    """What this part of the tensor keeps."""
    axes = [axis for axes in split for axis in axes]
    shape, part = list(x.shape), part_of(axes)
    mode = local_tensor_mode() if not torch.compiler.is_compiling() else None
    if mode is None:
        draw = torch.ops.autopar_runtime.kept if torch.compiler.is_compiling() else _draw
        return draw(shape, p, key, part, x.device)
    with mode.disable():
        parts = torch.stack([_draw(shape, p, key, i, x.device) for i in range(num_parts_of(axes))])
    return mode.rank_map(lambda rank: parts).narrow(0, part, 1).squeeze(0)


def _draw(shape: list[int], p: float, key: int, part: int, device: torch.device) -> Tensor:
    """True with probability 1 - p."""
    generator = torch.Generator(device).manual_seed(randomness().seed_of(key, part))
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=generator)


@torch.library.custom_op("autopar_runtime::kept", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _kept_op(shape: Sequence[int], p: float, key: int, part: int, device: torch.device) -> Tensor:
    """`_draw` as one node of a compiled graph, which reads seed and step when it runs."""
    return _draw(list(shape), p, key, part, device)


@_kept_op.register_fake
def _(shape: Sequence[int], p: float, key: int, part: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)
