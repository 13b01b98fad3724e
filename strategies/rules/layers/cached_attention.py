"""A cache of keys and values, and the attention of one query to it: samples, heads and positions of the cache are free.

Heads are split as in `attention`: groups of query heads with their head of keys, or, where these do not divide, query
heads alone, with all keys. An axis that splits positions of the cache has a part of every result, which are merged by
their log-sum-exp ("Flash-Decoding", Dao et al. 2023); what is written there comes whole to all of its ranks.

The keys and values of one query are read once: both calls take as long as the memory that they go through, and nothing
is lost to tiles of queries, as in attention of many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.program.operators.attention.cached import CACHED_ATTENTION, WRITE_CACHE
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, batch_names, rule, term
from autopar.strategies.rules.layers.attention import head_dims, heads_alone, merging

(SAMPLES,) = batch_names(1)
POSITIONS = "t"


def cached_attention(call: Call) -> OpRule:
    """`query` (b, heads, 1, d), `key` and `value` (b, heads, t, d), `positions` (b)."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    heads, key_heads = head_dims(query, key)
    further, alone, shared = heads_alone(call)
    terms = [
        term([SAMPLES, *heads, "s", WHOLE]),
        term([SAMPLES, *key_heads, POSITIONS, WHOLE]),
        term([SAMPLES, *key_heads, POSITIONS, WHOLE], "~"),
        term([SAMPLES]),
    ]
    return OpRule(
        rule(terms, [term([SAMPLES, *heads, "s", WHOLE])]) + further,
        (ByPartsOfTheCache(factors=frozenset({POSITIONS}) | shared),),
        flops=2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]),
        choices=alone,
    )


def write_cache(call: Call) -> OpRule:
    """`cache` (b, heads, t, d), `new` (b, heads, s, d), `positions` (b): it is written where the cache lies."""
    dims = [SAMPLES, "h", POSITIONS, "d"]
    terms = [term(dims), term([SAMPLES, "h", WHOLE, "d"]), term([SAMPLES])]
    return OpRule(rule(terms, [term(dims)]), (InPlace(),))


@dataclass(frozen=True, slots=True)
class ByPartsOfTheCache(Implementation):
    """Results of parts of the cache, merged by their log-sum-exp."""

    function: str = "attention.cached:cached_attention"
    joined: frozenset[str] = frozenset({POSITIONS})

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        return merging(call, sizes)


@dataclass(frozen=True, slots=True)
class InPlace(Implementation):
    """Keys and values written where the cache lies."""

    function: str = "attention.cached:write_cache"
    ordered: frozenset[str] | None = frozenset({POSITIONS})

    def flops(self, call: Call, sizes: LocalSizes) -> int:
        """Count the elements written."""
        return sizes[SAMPLES] * sizes["h"] * sizes["d"] * call["new"].shape[-2]

    def moved_bytes(self, op: OpRule, call: Call, sizes: LocalSizes, inputs: int, outputs: int) -> int:
        """Return twice the bytes of the inputs other than the cache, which are read and written.

        A part of a cache to which several positions are written is rebuilt, too.
        """
        written = 2 * (inputs - outputs)
        if call["new"].shape[-2] == 1 or sizes[POSITIONS] == call["cache"].shape[-2]:
            return written
        part = sizes[SAMPLES] * sizes["h"] * sizes[POSITIONS] * sizes["d"]
        return written + 3 * part * call["cache"].dtype.itemsize


RULES: dict[object, Entry] = {CACHED_ATTENTION: cached_attention, WRITE_CACHE: write_cache}
