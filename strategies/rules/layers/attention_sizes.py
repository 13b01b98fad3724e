"""How much of an attention one device has: rows of queries, heads, and elements of a key with its value."""

from __future__ import annotations

import math

from autopar.sharding.operation import Call, LocalSizes
from autopar.strategies.notation import batch_names

QUERY_HEADS = "q"
"""Heads of queries, split alone."""


def unkept(call: Call, sizes: LocalSizes) -> frozenset[int]:
    """Keys and values, where heads of them are taken."""
    return frozenset({1, 2}) if are_alone(call, sizes) else frozenset()


def batches(call: Call, sizes: LocalSizes) -> int:
    """Of one device."""
    return math.prod(sizes[name] for name in batch_names(len(call["query"].shape) - 3) if name in sizes)


def query_heads(call: Call, sizes: LocalSizes) -> int:
    """Of one device."""
    heads = math.prod(sizes[name] for name in ("h", "r") if name in sizes)
    return heads * sizes[QUERY_HEADS] // call["query"].shape[-3] if are_alone(call, sizes) else heads


def _key_heads(call: Call, sizes: LocalSizes) -> int:
    """Those that the queries of one device share; one of them, again and again, where their groups are cut."""
    query, key = call["query"].shape, call["key"].shape
    if len(query) < 3 or key[-3] == 1:
        return 1
    if not are_alone(call, sizes):
        return sizes["h"]
    heads = query_heads(call, sizes)
    return heads // math.gcd(heads, sizes["r"])


def are_alone(call: Call, sizes: LocalSizes) -> bool:
    """Whether axes split query heads alone."""
    return QUERY_HEADS in sizes and sizes[QUERY_HEADS] < call["query"].shape[-3]


def query_rows(call: Call, sizes: LocalSizes) -> int:
    return batches(call, sizes) * query_heads(call, sizes) * sizes["s"]


def elements_of_key(call: Call, sizes: LocalSizes) -> int:
    """Of a position, those of its key and value."""
    features = call["key"].shape[-1] + call["value"].shape[-1]
    return batches(call, sizes) * _key_heads(call, sizes) * features


def taken_bytes(call: Call, sizes: LocalSizes) -> int:
    """Of the heads of keys and values that were taken for query heads alone."""
    if not are_alone(call, sizes):
        return 0
    return elements_of_key(call, sizes) * sizes["t"] * call["value"].dtype.itemsize
