"""Ring self-attention gives what one device gives, forward and backward, and moves what its rule says."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.runtime.implementations.attention.ring_self_attention import attention
from tests.runtime.implementations.attention.test_by_blocks import (
    GATHERED,
    KINDS,
    RING,
    WAYS,
    Way,
    check,
    on_many,
    on_one,
    on_ranks,
    samples,
    train,
)
from tests.support.ranks import Ranks

OF_QUERIES = [way for way in WAYS if set(way.keys) <= set(way.queries)]
NESTED = Way((2, 2), ("a", "b"), ("b",))


@pytest.mark.parametrize(
    ("way", "zigzag", "kind"),
    [(RING, False, "causal"), (RING, True, "window"), (RING, True, "dead row"), (NESTED, True, "causal")],
    ids=str,
)
def test_ranks_compute_what_one_computes(way: Way, zigzag: bool, kind: str) -> None:
    check(way, zigzag, kind, 2, attention)


@pytest.mark.slow
@pytest.mark.parametrize("way", OF_QUERIES, ids=str)
@pytest.mark.parametrize("zigzag", [False, True], ids=["in order", "zigzag"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_ranks_compute_what_one_computes_however_they_divide_it(way: Way, zigzag: bool, key_heads: int) -> None:
    for kind in KINDS:
        check(way, zigzag, kind, key_heads, attention)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("way", "hops"), [(GATHERED, 0), (RING, 3)], ids=["gathered", "ring"])
def test_what_travels_is_counted(way: Way, hops: int) -> None:
    with on_ranks(way) as count, record_traffic() as traffic:
        on_many(way, True, "causal", samples(2), count, attention)
    keys = 2 * 2 * 16 * 2 * 8 * 8  # batch, heads, positions, of keys and values, features, bytes
    found = {name: number for (name, _), number in traffic.num_bytes.items() if name in ("permute", "reduce_scatter")}
    assert (found.get("permute", 0), found["reduce_scatter"] if hops else keys) == (2 * hops * keys // 4, keys)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_real_ranks_compute_what_one_computes(ranks: Ranks, compiled: bool) -> None:
    expected = on_one(samples(2), "causal")
    for found in ranks.run(train, {"s": ("a",), "t": ("a",)}, compiled, attention):
        for number, value in enumerate(found):
            tolerance = 1e-5 if number < 8 else 5e-2
            torch.testing.assert_close(value, expected[number % 4], rtol=tolerance, atol=tolerance)
