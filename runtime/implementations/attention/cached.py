"""A cache of keys and values in parts: what is written into it, and attention of one query, which ranks merge.

Factors: "h" heads, "q" query heads alone, "t" positions of the cache, the others are samples and features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.cached import attended, grouped, seen, written
from autopar.ir.program.operators.attention.kernels import Block, attend
from autopar.runtime.collectives.mesh_axes import Axes, axes_of, part_of
from autopar.runtime.implementations.attention.heads import shared_heads
from autopar.runtime.implementations.attention.positions import KEYS
from autopar.runtime.implementations.attention.steps import merged


def write_cache(cache: Tensor, new: Tensor, positions: Tensor, *, axes: Axes, sizes: Mapping[str, int]) -> Tensor:
    """Write new keys or values into this rank's part of `cache`, as `autopar.write_cache` does; return `cache`.

    Writes in place. Moves nothing.
    """
    split = axes_of(axes.get(KEYS, ()))
    if not split:
        return written(cache, new, positions)
    size, device = cache.shape[2], cache.device
    places = positions - part_of(split) * size
    if new.shape[2] == 1:
        samples, place = torch.arange(cache.shape[0], device=device), places.clamp(0, size - 1)
        lines = cache.transpose(1, 2)
        mine = ((places >= 0) & (places < size))[:, None, None]
        lines.index_put_((samples, place), torch.where(mine, new[:, :, 0], lines[samples, place]))
        return cache
    sources = torch.arange(size, device=device) - places.unsqueeze(-1)
    mine = ((sources >= 0) & (sources < new.shape[2]))[:, None, :, None]
    taken = sources.clamp(0, new.shape[2] - 1)[:, None, :, None].expand(*cache.shape)
    return cache.copy_(torch.where(mine, new.gather(2, taken), cache))


def cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `autopar.cached_attention` for this rank's heads and positions.

    Moves, over ranks that split positions: the result and two numbers per query.
    """
    keys, values = shared_heads(query, keys, values, axes, sizes)
    split = axes_of(axes.get(KEYS, ()))
    if not split:
        return attended(query, keys, values, positions, scale, window)
    own = torch.arange(keys.shape[2], device=keys.device) + part_of(split) * keys.shape[2]
    groups = grouped(query, keys)
    mask = seen(positions, own, window)[:, None, None].expand(-1, 1, groups.shape[2], -1)
    out, lse = attend(groups, keys, values, Block(scale, mask_BHST=mask))
    out, _ = merged(out, lse, split)
    return out.to(query.dtype).reshape(*query.shape[:-1], values.shape[-1])
