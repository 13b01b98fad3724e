"""Which scores of attention a dropout keeps: worked out from where they are, for any part of them, again and again.

    row i of a sample and head     n = mix(seed, sample, head, i)         64 bits, of which a and b are the halves
    key j                          c = mix(j)                             32 bits
    kept                           hash(a + c, b) ≥ p · 2^32              32 bits, wrapped around

So all devices that have a score agree on it, as do forward and backward, and nothing is kept but the seed. `mix` is
splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), `hash` two rounds in the way
of murmur3's finalizer (Appleby), on elements of 4 bytes.

In the deterministic mode rows have what they keep of all keys, as one device has drawn it, in place of n.
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
    """Numbers of 64 bits as others that look random."""
    x = x * _STEP
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


def lines_of(seed: Tensor, samples_B: Tensor, heads_H: Tensor) -> Tensor:
    """What tells apart seeds, samples and heads by their numbers: [B, H]."""
    return mix(mix(seed + mix(samples_B)).unsqueeze(-1) + mix(heads_H))


@dataclass(frozen=True, slots=True)
class Dropout:
    """A dropout of the probabilities of some queries and keys."""

    p: float
    rows_BHS: Tensor
    """What tells rows apart, int64; or, of truth values, what they keep of all keys: [B, H, S, all keys]."""
    columns_T: Tensor
    """What tells keys apart, int64; or which of all keys they are."""

    @classmethod
    def of(cls, p: float, drawn: Tensor, queries_S: Tensor, keys_T: Tensor) -> Dropout:
        """By the positions of queries and keys; `drawn` is of `lines_of`, or what queries keep of all keys."""
        if drawn.dtype is torch.bool:
            return cls(p, drawn, keys_T)
        return cls(p, mix(drawn.unsqueeze(-1) + mix(queries_S)), mix(keys_T))

    @property
    def scale(self) -> float:
        """What is kept is multiplied by this."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def part(self, queries: Range, keys: Range) -> Dropout:
        """That of queries and keys at some places."""
        return Dropout(self.p, self.rows_BHS[:, :, slice(*queries)], self.columns_T[slice(*keys)])

    def dropped(self) -> Tensor:
        """Truth values [B, H, S, T]."""
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
