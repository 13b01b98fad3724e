"""Scaled dot product attention: batch, heads and queries are free.

Query heads share key and value heads in groups of r, "(h r)", or all of them share one. The key sequence is always
whole; where a causal call's queries are split, each part builds its own mask. Biases and masks are broadcast.

A causal call computes the keys that its queries see, about half of all; a mask hides scores that are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.sharding.operation import Call, Implementation, LocalSizes, OpRule
from autopar.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, batch_names, broadcast, rule, term

aten = torch.ops.aten

FUSED_BACKWARD = 2.5
"""Five products backward for two forward, of which one are the scores again (Dao, "FlashAttention-2", 2023)."""
WRITTEN_OUT_BACKWARD = 2.0
"""Where probabilities are kept, as with dropout or where a mask has a gradient: two products for each forward."""


def _heads(query: Sequence[int], key: Sequence[int]) -> tuple[list[str], list[str]]:
    """The dims of query and key heads: one head of keys serves all queries, several serve r queries each."""
    if query[-3] == key[-3]:
        return ["h"], ["h"]
    return (["h"], ["1"]) if key[-3] == 1 else (["(h r)"], ["h"])


def attention(call: Call) -> OpRule:
    """`query` (…, heads, s, d), `key` and `value` (…, heads, t, d), a mask that is broadcast to (…, heads, s, t)."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    batch = batch_names(len(query) - 3)
    heads, key_heads = _heads(query, key) if len(query) > 2 else ([], [])
    dims = [*batch, *heads, "s", WHOLE]
    scores = (*query[:-1], key[-2])
    terms = [
        term(dims),
        term(broadcast(key, (*query[:-3], *key[-3:]), [*batch, *key_heads, WHOLE, WHOLE])),
        term(broadcast(value, (*query[:-3], *value[-3:]), [*batch, *key_heads, WHOLE, WHOLE]), "~"),
    ]
    if call["attn_mask"] is not None:
        terms.append(term(broadcast(call["attn_mask"].shape, scores, dims)))
    text = rule(terms, [term(dims)])
    ways: tuple[Implementation, ...] = ()
    if call["dropout_p"] > 0:
        ways = (Implementation("dropout:attention_with_dropout", factors=None, random=True),)
    elif call["is_causal"]:
        split = frozenset({"s"})
        ways = (Implementation("attention:causal_attention", split, padded=split, flops=_masked_flops),)
    fused = call["dropout_p"] == 0 and (call["attn_mask"] is None or not call["attn_mask"].requires_grad)
    return OpRule(
        text,
        ways,
        flops=_flops(call, causal=call["is_causal"] and fused),
        backward=FUSED_BACKWARD if fused else WRITTEN_OUT_BACKWARD,
        efficiency="attention",
    )


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


def _masked_flops(call: Call, sizes: LocalSizes) -> int:
    """Of a device's queries and all keys: a mask leaves nothing out."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    free = (*batch_names(len(query) - 3), "h", "r", "s")
    scores = math.prod(sizes[name] for name in free if name in sizes) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


RULES: dict[torch._ops.OpOverload, Entry] = {aten.scaled_dot_product_attention.default: attention}

BY_NAME: dict[str, Entry] = {
    "transformers.models.yoso.modeling_yoso.YosoCumulation": "b s, b t, b s _, b t _, b t e -> b s e",
}
"""autograd.Functions of libraries that need not be there; YOSO's has masks, queries, keys and values."""
