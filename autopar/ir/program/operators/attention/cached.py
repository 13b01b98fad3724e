"""A cache of keys and values of a fixed length: what is written into it, and the attention of one query to it.

    write_cache(cache, new, positions) -> cache          (B, G, T, D), (B, G, S, D), (B)
    cached_attention(query, key, value, positions, scale, window=None) -> y
                                                         (B, H, 1, D), (B, G, T, D) twice, (B)

Samples have positions of their own, so that prompts may differ in length: `new` is written from there on, and the
query, which stands there, sees what stands up to it, or the last `window` positions up to it. Entries behind it, such
as those of padding, are not read until they are overwritten. Neither has a derivative. Legend as in `kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def written(cache_BGTD: Tensor, new_BGSD: Tensor, positions_B: Tensor) -> Tensor:
    """Return the cache itself, with `new` in it."""
    samples = torch.arange(cache_BGTD.shape[0], device=cache_BGTD.device).unsqueeze(-1)
    places_BS = positions_B.unsqueeze(-1) + torch.arange(new_BGSD.shape[2], device=cache_BGTD.device)
    cache_BGTD.transpose(1, 2).index_put_((samples, places_BS), new_BGSD.transpose(1, 2))
    return cache_BGTD


def seen(positions_B: Tensor, keys_T: Tensor, window: int | None) -> Tensor:
    """Return for each sample the keys, by their positions, that its query sees: truth values [B, T]."""
    found = keys_T <= positions_B.unsqueeze(-1)
    return found if window is None else found & (keys_T > positions_B.unsqueeze(-1) - window)


def grouped(query_BH1D: Tensor, keys_BGTD: Tensor) -> Tensor:
    """Return the queries that share a head of keys as its queries: [B, G, H / G, D]."""
    return query_BH1D.reshape(query_BH1D.shape[0], keys_BGTD.shape[1], -1, query_BH1D.shape[-1])


def attended(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Compute `cached_attention` on a device that has all positions."""
    mask = seen(positions, torch.arange(key.shape[2], device=key.device), window)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped(query, key), key, value, attn_mask=mask[:, None, None], scale=scale
    )
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _write(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    return written(cache.clone(), new, positions)


for _schema in (
    "write_cache(Tensor cache, Tensor new, Tensor positions) -> Tensor",
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor positions, float scale, int? window=None)"
    " -> Tensor",
):
    torch.library.define(f"autopar::{_schema.partition('(')[0]}", _schema[_schema.index("(") :])
# An operator may not return its input: eager runs copy, and ranks write where the cache lies.
torch.library.impl("autopar::write_cache", "CompositeExplicitAutograd", _write)
torch.library.impl("autopar::cached_attention", "CompositeExplicitAutograd", attended)


@torch.library.register_fake("autopar::write_cache")
def _(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    return torch.empty_like(cache)


@torch.library.register_fake("autopar::cached_attention")
def _(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int | None = None) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


WRITE_CACHE: torch._ops.OpOverload = torch.ops.autopar.write_cache.default
CACHED_ATTENTION: torch._ops.OpOverload = torch.ops.autopar.cached_attention.default
