"""Dropout of attention scores, computed from their positions, so that any part can be computed again.

    row i of a sample and head     n = mix(seed, sample, head, i)         64 bits, of which a and b are the halves
    key j                          c = mix(j)                             32 bits
    kept                           hash(a + c, b) ≥ p · 2^32              32 bits, wrapped around

So all devices that have a score agree on it, as do forward and backward, and nothing is saved but the seed. `mix` is
splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), `hash` two rounds in the way
of murmur3's finalizer (Appleby), on elements of 4 bytes.

The deterministic mode replaces n of a row by truth values over all keys, the kept ones, as one device has drawn them.
Legend as in `kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]
"""First place, and the place behind the last one."""

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_FIRST_32, _SECOND_32 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


def mix(x: Tensor) -> Tensor:
    """Hash 64-bit numbers (splitmix64)."""
    x = x * _STEP
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


def lines_of(seed: Tensor, samples_B: Tensor, heads_H: Tensor) -> Tensor:
    """Return 64-bit numbers that distinguish seeds, samples and heads: [B, H]."""
    return mix(mix(seed + mix(samples_B)).unsqueeze(-1) + mix(heads_H))


@dataclass(frozen=True, slots=True)
class Dropout:
    """A dropout of the probabilities of some queries and keys."""

    p: float
    rows_BHS: Tensor
    """Numbers that distinguish rows, int64; or truth values of the keys that each row keeps: [B, H, S, all keys]."""
    columns_T: Tensor
    """Numbers that distinguish keys, int64; or their indices among all keys."""

    @classmethod
    def of(cls, p: float, drawn: Tensor, queries_S: Tensor, keys_T: Tensor) -> Dropout:
        """Build the dropout for the positions of queries and keys.

        `drawn` comes from `lines_of`, or holds truth values of the keys that queries keep.
        """
        if drawn.dtype is torch.bool:
            return cls(p, drawn, keys_T)
        return cls(p, mix(drawn.unsqueeze(-1) + mix(queries_S)), mix(keys_T))

    @property
    def scale(self) -> float:
        """Factor by which kept values are multiplied."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def part(self, queries: Range, keys: Range) -> Dropout:
        """Return the dropout of a range of queries and a range of keys."""
        return Dropout(self.p, self.rows_BHS[:, :, slice(*queries)], self.columns_T[slice(*keys)])

    def dropped(self) -> Tensor:
        """Return a bool mask [B, H, S, T]."""
        if self.rows_BHS.dtype is torch.bool:
            return ~self.rows_BHS.index_select(-1, self.columns_T)
        a, b = self.rows_BHS.to(torch.int32), (self.rows_BHS >> 32).to(torch.int32)
        x = a.unsqueeze(-1) + self.columns_T.to(torch.int32)
        x ^= x >> 16
        x *= _FIRST_32
        x += b.unsqueeze(-1)
        x ^= x >> 15
        x *= _SECOND_32
        return x < min(round(self.p * 2**32) - 2**31, 2**31 - 1)
