"""Ring self-attention, an implementation of attention that is offered on request.

Keys travel around the ranks until each has the whole rows of scores of its queries, then values do (Li et al.,
"Sequence Parallelism: Long Sequence Training from System Perspective", 2021). Scores are written out, those that a mask
hides, too, and their softmax is saved for the backward. There values and keys travel once more, and the gradients of
all keys and values, of which each rank has a part of the sum, are reduce-scattered.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.sharding.operation import Call, Collective, Efficiency, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import TOGETHER
from autopar.strategies.rules.layers.attention_sizes import (
    batches,
    elements_of_key,
    query_heads,
    query_rows,
    taken_bytes,
    taken_inputs,
)

NAME = "ring_self_attention"
PASSES_OVER_SCORES = 4
"""Number of forward passes over the scores: written, read and written by the softmax, read by the last product."""
PASSES_OF_A_MASK = 2
"""Read and written."""
HIDDEN_SHARE = 2 / 3
"""Keys and values that travel while a rank computes; as they do so twice, half as much is reduce-scattered."""


@dataclass(frozen=True, slots=True)
class RingSelfAttention(Implementation):
    """Attention of a rank's queries to whole rows of scores, while keys, then values, come around a ring."""

    function: str = "attention.ring_self_attention:attention"
    ordered: frozenset[str] | None = frozenset()
    name: str = NAME
    on_demand: bool = True
    efficiency: Efficiency | None = "matmul"

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return the messages of keys and values around the ring, both ways, and the sums of their gradients."""
        around = TOGETHER + "t"
        parts = sizes.get(around, 1)
        if parts == 1:
            return ()
        own = elements_of_key(call, sizes) * sizes["t"] * call["value"].dtype.itemsize
        return (
            *(Collective("permute", around, own, backward) for backward in (False, True) for _ in range(parts - 1)),
            Collective("reduce_scatter", around, own * parts, backward=True),
        )

    def hidden_share(self, call: Call, sizes: LocalSizes) -> float:
        return HIDDEN_SHARE

    def flops(self, call: Call, sizes: LocalSizes) -> int:
        """Return the forward FLOPs for whole rows of scores, whatever a mask hides: two per score and feature."""
        features = call["query"].shape[-1] + call["value"].shape[-1]
        return 2 * batches(call, sizes) * query_heads(call, sizes) * sizes["s"] * call["key"].shape[-2] * features

    def moved_bytes(self, op: OpRule, call: Call, sizes: LocalSizes, inputs: int, outputs: int) -> int:
        """Return the bytes read and written, with those of scores, and of their mask."""
        masked = call["is_causal"] or call["attn_mask"] is not None
        passes = PASSES_OVER_SCORES + PASSES_OF_A_MASK * masked
        return op.moved_bytes(inputs, outputs) + passes * _scores_bytes(call, sizes)

    def saved_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of the softmax of whole rows, and of heads of keys and values copied for these queries."""
        return _scores_bytes(call, sizes) + taken_bytes(call, sizes)

    def unkept(self, call: Call, sizes: LocalSizes) -> frozenset[int]:
        return taken_inputs(call, sizes)


def _scores_bytes(call: Call, sizes: LocalSizes) -> int:
    return query_rows(call, sizes) * call["key"].shape[-2] * call["query"].dtype.itemsize
