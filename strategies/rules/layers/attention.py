"""Scaled dot product attention: batch, heads and queries are free, and keys where the call runs by blocks.

Query heads share key and value heads in groups of r, "(h r)", or all of them share one. An axis splits groups, or,
where these do not divide, query heads alone, "q": keys and values are whole then, and a rank takes of them the heads
that its queries share. An axis may split queries, with whole keys; queries and keys, where both are as many: "s+t", a
ring, or `ring_self_attention` if requested and nothing is dropped; or keys, where there are others than queries. Under
a mask of numbers keys are whole. Biases and masks are broadcast. A dropout runs by blocks on every layout, but under
such a mask, where all probabilities are made.

A causal call computes the keys that its queries see, about half of all; a mask hides scores that are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.program.operators.attention.hops import chains_of, hops_of
from autopar.ir.sharding.layout import R, S
from autopar.ir.sharding.operation import ZIGZAG, Call, Collective, Efficiency, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import TOGETHER, WHOLE, Choice
from autopar.strategies.notation import Entry, batch_names, broadcast, rule, term
from autopar.strategies.rules.layers.attention_sizes import (
    QUERY_HEADS,
    batches,
    elements_of_key,
    query_heads,
    query_rows,
    taken_bytes,
    taken_inputs,
)
from autopar.strategies.rules.layers.ring_self_attention import RingSelfAttention

aten = torch.ops.aten

FUSED_BACKWARD = 2.5
"""Five products backward for two forward, of which one are the scores again (Dao, "FlashAttention-2", 2023)."""
WRITTEN_OUT_BACKWARD = 2.0
"""Ratio of backward to forward FLOPs if probabilities are saved, as when a mask has a gradient.

The backward has two products for each one of the forward.
"""

WIDE_BYTES = 4
"""Bytes of a float32 number, in which results and gradients are summed."""


def head_dims(query: Sequence[int], key: Sequence[int]) -> tuple[list[str], list[str]]:
    """The dims of query and key heads: one head of keys serves all queries, several serve r queries each."""
    if query[-3] == key[-3]:
        return ["h"], ["h"]
    return (["h"], ["1"]) if key[-3] == 1 else (["(h r)"], ["h"])


def heads_alone(call: Call) -> tuple[str, tuple[Choice, ...], frozenset[str]]:
    """The choice to split query heads alone, where several share a head of keys: what its rule says of it besides.

    That is the text behind the terms, the choice, and the factor that an implementation serves.
    """
    query, key = call["query"].shape, call["key"].shape
    if len(query) < 3 or key[-3] in (1, query[-3]):
        return "", (), frozenset()
    queries, *masks = (
        S(len(shape) - 3) if len(shape) > 2 and shape[-3] > 1 else R
        for shape in (query, *(info.shape for info in call.inputs[3:]))
    )
    choice = Choice(QUERY_HEADS, (queries, R, R, *masks), (queries,))
    return f"; {QUERY_HEADS} = h r", (choice,), frozenset({QUERY_HEADS})


def attention(call: Call) -> OpRule:
    """`query` (…, heads, s, d), `key` and `value` (…, heads, t, d), a mask that is broadcast to (…, heads, s, t)."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    batch = batch_names(len(query) - 3)
    heads, key_heads = head_dims(query, key) if len(query) > 2 else ([], [])
    dropout = call["dropout_p"] > 0
    mask = call["attn_mask"]
    # Numbers may hide keys without being -inf: a row that sees none is then a mean over all keys, which no merge gives.
    in_parts = mask is None or mask.dtype is torch.bool
    fused = mask is None or in_parts or not (dropout or mask.requires_grad)
    keys = "t" if in_parts else WHOLE
    dims = [*batch, *heads, "s", WHOLE]
    scores = (*query[:-1], key[-2])
    terms = [
        term(dims),
        term(broadcast(key, (*query[:-3], *key[-3:]), [*batch, *key_heads, keys, WHOLE])),
        term(broadcast(value, (*query[:-3], *value[-3:]), [*batch, *key_heads, keys, WHOLE]), "~"),
    ]
    if call["attn_mask"] is not None:
        terms.append(term(broadcast(call["attn_mask"].shape, scores, [*dims[:-1], keys])))
    further, alone, shared = heads_alone(call)
    text = rule(terms, [term(dims)]) + further
    flops = _flops(call, causal=call["is_causal"] and fused)
    backward = FUSED_BACKWARD if fused else WRITTEN_OUT_BACKWARD
    kernel: Efficiency = "masked attention" if call["is_causal"] else "attention"
    if not in_parts:
        taking = Implementation("attention.heads:attention", shared)
        ways = (WithDropout(),) if dropout else (taking,) if shared else ()
        return OpRule(text, ways, flops=flops, backward=backward, efficiency=kernel, head_size=query[-1], choices=alone)
    causal, around = call["is_causal"], query[-2] == key[-2]
    served = (frozenset({"s", "t"}) if causal else frozenset({"t"})) | shared
    by_blocks = ByBlocks(
        factors=None if dropout else served,
        padded=frozenset({"s"}) if causal else frozenset(),
        random=dropout,
    )
    ways = (by_blocks, RingSelfAttention(factors=served)) if around and not dropout else (by_blocks,)
    return OpRule(
        text,
        ways,
        flops=flops,
        backward=backward,
        efficiency=kernel,
        head_size=query[-1],
        only_together=frozenset({"t"}) if around else frozenset(),
        choices=(*alone, *((_ring(call),) if around else ())),
    )


def _ring(call: Call) -> Choice:
    """Queries and keys divided alike: keys and values travel. A mask has a rank's queries and all keys."""
    mask = call["attn_mask"]
    masked = () if mask is None else (S(len(mask.shape) - 2) if mask.shape[-2] > 1 else R,)
    queries, keys = (S(len(call[name].shape) - 2) for name in ("query", "key"))
    return Choice(f"s{TOGETHER}t", (queries, keys, keys, *masked), (queries,))


def _flops(call: Call, causal: bool) -> int:
    """Scores and their product with the values: a multiplication and an addition per query, key it sees and feature."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    num_queries, num_keys = query[-2], key[-2]
    if not causal:
        twice_seen = 2 * num_queries * num_keys
    elif num_queries <= num_keys:
        twice_seen = num_queries * (num_queries + 1)
    else:
        twice_seen = num_keys * (num_keys + 1) + 2 * (num_queries - num_keys) * num_keys
    return math.prod(query[:-2]) * twice_seen * (query[-1] + value[-1])


@dataclass(frozen=True, slots=True)
class ByBlocks(Implementation):
    """Attention by blocks of queries and keys: on parts of the keys, whose results are merged, or around a ring."""

    function: str = "attention.by_blocks:attention"
    joined: frozenset[str] = frozenset({"t"})
    ordered: frozenset[str] | None = frozenset()

    def reach(self, call: Call) -> int | None:
        """Return how many positions back a query may see, if none sees any ahead; None: all."""
        return None

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return the messages of keys and values, then of their gradients, around a ring; or the sums of `merging`."""
        parts, around = sizes.get(TOGETHER + "t", 1), TOGETHER + "t"
        if parts == 1:
            return merging(call, sizes)
        value, each = call["value"], elements_of_key(call, sizes)
        zigzag_parts, alike = sizes.get(ZIGZAG + "s", 0), sizes["s"] == sizes["t"]
        hops = hops_of(self.reach(call) if alike and zigzag_parts < 2 else None, sizes["t"], parts, bool(zigzag_parts))
        keys, gradients = each * value.dtype.itemsize, each * max(WIDE_BYTES, value.dtype.itemsize)
        return (
            *(Collective("permute", around, keys * hop.size) for hop in hops),
            *(Collective("permute", around, keys * hop.size, backward=True) for hop in hops),
            *(Collective("permute", around, gradients * hop.size, backward=True) for hop in chains_of(hops)),
        )

    def hidden_share(self, call: Call, sizes: LocalSizes) -> float:
        """Return 1 for a ring, which sends keys while it computes with those before them; else 0."""
        return 1.0 if call["query"].shape[-2] == call["key"].shape[-2] else 0.0

    def flops(self, call: Call, sizes: LocalSizes) -> int:
        """Return the forward FLOPs of the busiest device.

        If causal positions are split in order, that is the last one, which sees nearly all keys.
        """
        query, key, value = (call[name].shape for name in ("query", "key", "value"))
        queries, keys = sizes["s"], sizes["t"]
        if not call["is_causal"]:
            twice_seen = 2 * queries * (key[-2] if TOGETHER + "t" in sizes else keys)
        elif ZIGZAG + "s" in sizes:
            twice_seen = queries * (key[-2] + 1)
        else:
            twice_seen = queries * (2 * key[-2] + 1 - queries)
        return batches(call, sizes) * query_heads(call, sizes) * twice_seen * (query[-1] + value[-1])

    def saved_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the saved bytes: the log-sum-exp of local query rows, and heads of keys and values copied for them.

        A dropout adds a 64-bit number per sample and head.
        """
        drawn = 8 * batches(call, sizes) * query_heads(call, sizes) if call["dropout_p"] > 0 else 0
        wide = max(WIDE_BYTES, call["query"].dtype.itemsize)
        return query_rows(call, sizes) * wide + drawn + taken_bytes(call, sizes)

    def unkept(self, call: Call, sizes: LocalSizes) -> frozenset[int]:
        return taken_inputs(call, sizes)


@dataclass(frozen=True, slots=True)
class WithDropout(Implementation):
    """Attention whose probabilities are all made, and dropped, as under a mask of numbers."""

    function: str = "attention.explicit:attention_with_dropout"
    random: bool = True

    def saved_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of all probabilities, and of those that are not dropped."""
        return 2 * query_rows(call, sizes) * call["key"].shape[-2] * max(WIDE_BYTES, call["query"].dtype.itemsize)


def merging(call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
    """Return the collectives that merge results of parts of the keys: their log-sum-exp twice, and they once."""
    value, rows = call["value"], query_rows(call, sizes)
    wide = max(WIDE_BYTES, value.dtype.itemsize)
    return tuple(Collective("all_reduce", "t", rows * wide * size) for size in (1, 1, value.shape[-1]))


RULES: dict[torch._ops.OpOverload, Entry] = {aten.scaled_dot_product_attention.default: attention}

BY_NAME: dict[str, Entry] = {
    "transformers.models.yoso.modeling_yoso.YosoCumulation": "b s, b t, b s _, b t _, b t e -> b s e",
}
"""autograd.Functions of libraries that need not be there; YOSO's has masks, queries, keys and values."""
