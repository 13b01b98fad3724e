"""Ring self-attention, an implementation of attention that is offered on request.

Keys travel around the ranks until each has the whole rows of scores of its queries, then values do (Li et al.,
"Sequence Parallelism: Long Sequence Training from System Perspective", 2021). Scores are written out, those that a mask
hides, too, and their softmax is kept for the backward. There values and keys travel once more, and the gradients of
all keys and values, of which each rank has a part of the sum, are reduce-scattered.
"""

from __future__ import annotations

from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes
from autopar.ir.sharding.rule import TOGETHER
from autopar.strategies.rules.layers.attention_sizes import (
    batches,
    elements_of_key,
    query_heads,
    query_rows,
    taken_bytes,
    unkept,
)

NAME = "ring_self_attention"
PASSES_OVER_SCORES = 4
"""Number of forward passes over the scores: written, read and written by the softmax, read by the last product."""
PASSES_OF_A_MASK = 2
"""Read and written."""
HIDDEN_SHARE = 2 / 3
"""Keys and values that travel while a rank computes; as they do so twice, half as much is reduce-scattered."""


def ring_self_attention(factors: frozenset[str]) -> Implementation:
    """The implementation, of a rule whose factors these are."""
    return Implementation(
        "attention.ring_self_attention:attention",
        factors,
        traffic=_traffic,
        zigzag=True,
        name=NAME,
        on_demand=True,
        flops=_flops,
        scratch_bytes=_scratch_bytes,
        saved_bytes=_kept_bytes,
        unkept=unkept,
        efficiency="matmul",
        hidden_share=HIDDEN_SHARE,
    )


def _flops(call: Call, sizes: LocalSizes) -> int:
    """Return the forward FLOPs for whole rows of scores, whatever a mask hides: two per score and feature."""
    features = call["query"].shape[-1] + call["value"].shape[-1]
    return 2 * batches(call, sizes) * query_heads(call, sizes) * sizes["s"] * call["key"].shape[-2] * features


def _scores_bytes(call: Call, sizes: LocalSizes) -> int:
    return query_rows(call, sizes) * call["key"].shape[-2] * call["query"].dtype.itemsize


def _scratch_bytes(call: Call, sizes: LocalSizes) -> int:
    """Return the bytes of scores, and of their mask, that the forward reads and writes."""
    masked = call["is_causal"] or call["attn_mask"] is not None
    return (PASSES_OVER_SCORES + PASSES_OF_A_MASK * masked) * _scores_bytes(call, sizes)


def _kept_bytes(call: Call, sizes: LocalSizes) -> int:
    """The softmax of whole rows; and the heads of keys and values that were taken for these queries."""
    return _scores_bytes(call, sizes) + taken_bytes(call, sizes)


def _traffic(call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
    """Keys and values around the ring, forward and backward; the sums of their gradients."""
    around = TOGETHER + "t"
    parts = sizes.get(around, 1)
    if parts == 1:
        return ()
    own = elements_of_key(call, sizes) * sizes["t"] * call["value"].dtype.itemsize
    return (
        *(Collective("permute", around, own, backward) for backward in (False, True) for _ in range(parts - 1)),
        Collective("reduce_scatter", around, own * parts, backward=True),
    )
