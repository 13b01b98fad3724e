"""Attention under a mask of vectors: as attention's rule, with the dims of queries and of keys that vectors have.

Vectors determine what a query sees; they are sharded with queries and keys, whose positions do not matter. An
axis may split queries, with whole keys; queries and keys, where both are as many: "s+t", a ring; or keys, where there
are others than queries. On a ring every rank has the vectors of all keys, which are small; where queries see a window
of what lies before them, those travel that others see.

A block that the mask hides is not computed. As far as that is known without data, the call says how many are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import R, S
from autopar.ir.sharding.operation import ZIGZAG, Call, LocalSizes, OpRule
from autopar.ir.sharding.rule import TOGETHER, WHOLE, Choice
from autopar.strategies.notation import Entry, broadcast, rule, term
from autopar.strategies.rules.layers.attention import FUSED_BACKWARD, ByBlocks, head_dims, heads_alone
from autopar.strategies.rules.layers.attention_sizes import batches, query_heads


def attention_by_mask(call: Call) -> OpRule:
    """`query` (b, heads, s, d), `key` and `value` (b, heads, t, d), vectors that are broadcast to (b, heads, s, t)."""
    query, key = call["query"].shape, call["key"].shape
    heads, key_heads = head_dims(query, key)
    scores, names = (*query[:-1], key[-2]), ["a0", *heads, "s", "t"]
    queries, keys = term([*names[:-1], WHOLE]), [names[0], *key_heads, "t", WHOLE]
    sinks = () if call["sinks"] is None else (call["sinks"],)
    vectors = [term(broadcast(each.shape, scores, names)) for each in (*call["vectors"], *sinks)]
    around = query[-2] == key[-2]
    further, alone, shared = heads_alone(call)
    dropout = call["dropout_p"] > 0
    by_blocks = ByMask(factors=None if dropout else frozenset({"s", "t"}) | shared, random=dropout)
    return OpRule(
        rule([queries, term(keys), term(keys, "~"), *vectors], [queries]) + further,
        (by_blocks,),
        flops=round(call["seen"] * _flops(call, query[-2], key[-2], math.prod(query[:-2]))),
        backward=FUSED_BACKWARD,
        efficiency="masked attention",
        head_size=query[-1],
        only_together=frozenset({"t"}) if around else frozenset(),
        choices=(*alone, *((_ring((*call["vectors"], *sinks)),) if around else ())),
    )


def _ring(vectors: Sequence[TensorInfo]) -> Choice:
    """Queries and keys divided alike: keys and values travel; every rank has the vectors of all keys."""
    of_queries = tuple(S(len(x.shape) - 2) if len(x.shape) > 1 and x.shape[-2] > 1 else R for x in vectors)
    return Choice(f"s{TOGETHER}t", (S(2), S(2), S(2), *of_queries), (S(2),))


def _flops(call: Call, queries: int, keys: int, heads: int) -> int:
    """Scores and their product with the values: a multiplication and an addition per query, key and feature."""
    return 2 * heads * queries * keys * (call["query"].shape[-1] + call["value"].shape[-1])


@dataclass(frozen=True, slots=True)
class ByMask(ByBlocks):
    """Attention by those blocks that a mask of vectors does not hide."""

    function: str = "attention.by_mask:attention_by_mask"
    padded: frozenset[str] = frozenset({"s"})

    def reach(self, call: Call) -> int | None:
        return call["reach"]

    def flops(self, call: Call, sizes: LocalSizes) -> int:
        """Return the forward FLOPs of the busiest device.

        If later queries see more and are split in order, that is the last one.
        """
        heads = batches(call, sizes) * query_heads(call, sizes)
        keys = call["key"].shape[-2] if TOGETHER + "t" in sizes else sizes["t"]
        seen = call["seen"]
        if call["rising"] and ZIGZAG + "s" not in sizes:
            seen = min(1.0, seen * (2 - sizes["s"] / call["query"].shape[-2]))
        return round(seen * _flops(call, sizes["s"], keys, heads))


RULES: dict[object, Entry] = {ATTENTION_BY_MASK: attention_by_mask}
