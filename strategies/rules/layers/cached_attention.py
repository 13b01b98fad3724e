"""A cache of keys and values, and the attention of one query to it: samples, heads and positions of the cache are free.

Heads are split as in `attention`: groups of query heads with their head of keys, or, where these do not divide, query
heads alone, with all keys. An axis that splits positions of the cache has a part of every result, which are merged by
their log-sum-exp ("Flash-Decoding", Dao et al. 2023); what is written there comes whole to all of its ranks.

The keys and values of one query are read once: both calls take as long as the memory that they go through, and nothing
is lost to tiles of queries, as in attention of many.
"""

from __future__ import annotations

import math

from autopar.ir.program.operators.attention.cached import CACHED_ATTENTION, WRITE_CACHE
from autopar.ir.sharding.operation import Call, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, batch_names, rule, term
from autopar.strategies.rules.layers.attention import head_dims, heads_alone, traffic

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
    by_parts = Implementation(
        "attention.cached:cached_attention",
        frozenset({POSITIONS}) | shared,
        joined=frozenset({POSITIONS}),
        traffic=traffic,
        ordered=frozenset({POSITIONS}) | shared,
    )
    return OpRule(
        rule(terms, [term([SAMPLES, *heads, "s", WHOLE])]) + further,
        (by_parts,),
        flops=2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]),
        choices=alone,
    )


def write_cache(call: Call) -> OpRule:
    """`cache` (b, heads, t, d), `new` (b, heads, s, d), `positions` (b): it is written where the cache lies."""
    in_place = Implementation(
        "attention.cached:write_cache",
        None,
        ordered=frozenset({POSITIONS}),
        flops=_elements_written,
        moved_bytes=_read_and_written_anew,
        scratch_bytes=_gone_through,
    )
    dims = [SAMPLES, "h", POSITIONS, "d"]
    terms = [term(dims), term([SAMPLES, "h", WHOLE, "d"]), term([SAMPLES])]
    return OpRule(rule(terms, [term(dims)]), (in_place,))


def _elements_written(call: Call, sizes: LocalSizes) -> int:
    return sizes[SAMPLES] * sizes["h"] * sizes["d"] * call["new"].shape[-2]


def _read_and_written_anew(inputs: int, outputs: int) -> int:
    """Return twice the bytes of the inputs other than the cache: they are read and written."""
    return 2 * (inputs - outputs)


def _gone_through(call: Call, sizes: LocalSizes) -> int:
    """Return the bytes moved to rebuild a part of a cache, if several positions are written to it; else 0."""
    if call["new"].shape[-2] == 1 or sizes[POSITIONS] == call["cache"].shape[-2]:
        return 0
    return 3 * sizes[SAMPLES] * sizes["h"] * sizes[POSITIONS] * sizes["d"] * call["cache"].dtype.itemsize


RULES: dict[object, Entry] = {CACHED_ATTENTION: cached_attention, WRITE_CACHE: write_cache}
