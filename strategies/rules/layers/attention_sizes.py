"""Sizes of one device's part of an attention: rows of queries, heads, and elements of a key with its value."""

from __future__ import annotations

import math

from autopar.ir.sharding.operation import Call, LocalSizes
from autopar.strategies.notation import batch_names

QUERY_HEADS = "q"
"""Heads of queries, split alone."""


def taken_inputs(call: Call, sizes: LocalSizes) -> frozenset[int]:
    """Return the positions of keys and values if heads of them are copied for query heads that are split alone."""
    return frozenset({1, 2}) if are_alone(call, sizes) else frozenset()


def batches(call: Call, sizes: LocalSizes) -> int:
    """Return the number of samples on one device: the product of its batch dims."""
    return math.prod(sizes[name] for name in batch_names(len(call["query"].shape) - 3) if name in sizes)


def query_heads(call: Call, sizes: LocalSizes) -> int:
    """Return the number of query heads on one device."""
    heads = math.prod(sizes[name] for name in ("h", "r") if name in sizes)
    return heads * sizes[QUERY_HEADS] // call["query"].shape[-3] if are_alone(call, sizes) else heads


def _key_heads(call: Call, sizes: LocalSizes) -> int:
    """Return the number of heads of keys that one device's queries use.

    If the groups of query heads are cut unevenly, a head counts once for each equal part of its group.
    """
    query, key = call["query"].shape, call["key"].shape
    if len(query) < 3 or key[-3] == 1:
        return 1
    if not are_alone(call, sizes):
        return sizes["h"]
    heads = query_heads(call, sizes)
    return heads // math.gcd(heads, sizes["r"])


def are_alone(call: Call, sizes: LocalSizes) -> bool:
    """Return whether axes split query heads without splitting the heads of keys."""
    return QUERY_HEADS in sizes and sizes[QUERY_HEADS] < call["query"].shape[-3]


def query_rows(call: Call, sizes: LocalSizes) -> int:
    return batches(call, sizes) * query_heads(call, sizes) * sizes["s"]


def elements_of_key(call: Call, sizes: LocalSizes) -> int:
    """Return the elements of one position's keys and values on one device."""
    features = call["key"].shape[-1] + call["value"].shape[-1]
    return batches(call, sizes) * _key_heads(call, sizes) * features


def taken_bytes(call: Call, sizes: LocalSizes) -> int:
    """Return the bytes of the heads of keys and values copied for query heads that are split alone; else 0."""
    if not are_alone(call, sizes):
        return 0
    return elements_of_key(call, sizes) * sizes["t"] * call["value"].dtype.itemsize
