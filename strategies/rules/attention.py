"""Scaled dot product attention: batch, heads and queries are free.

Query heads share key and value heads in groups of r, "(h r)". The key sequence is always whole; where a causal call's
queries are split, each part builds its own mask. Biases and masks are broadcast.
"""

from __future__ import annotations

import math

import torch

from autopar.sharding.operation import Call, Implementation, OpRule
from autopar.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, batch_names, broadcast, rule, term

aten = torch.ops.aten


def attention(call: Call) -> OpRule:
    """`query` (…, heads, s, d), `key` and `value` (…, heads, t, d), a mask that is broadcast to (…, heads, s, t)."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    batch = batch_names(len(query) - 3)
    grouped = call["enable_gqa"] and query[-3] != key[-3]
    heads = ["(h r)" if grouped else "h"] if len(query) > 2 else []
    key_heads = ["h"] if len(query) > 2 else []
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
    # Scores and their product with the values: a multiplication and an addition per query, key and feature.
    flops = 2 * math.prod(scores) * (query[-1] + value[-1])
    if call["dropout_p"] > 0:
        implementation = Implementation("dropout:attention_with_dropout", factors=None, random=True)
        return OpRule(text, (implementation,), flops=flops, efficiency="attention")
    if call["is_causal"]:
        by_queries = Implementation("attention:causal_attention", frozenset({"s"}))
        return OpRule(text, (by_queries,), flops=flops, efficiency="attention")
    return OpRule(text, flops=flops, efficiency="attention")


RULES: dict[torch._ops.OpOverload, Entry] = {aten.scaled_dot_product_attention.default: attention}

BY_NAME: dict[str, Entry] = {
    "transformers.models.yoso.modeling_yoso.YosoCumulation": "b s, b t, b s _, b t _, b t e -> b s e",
}
"""autograd.Functions of libraries that need not be there; YOSO's has masks, queries, keys and values."""
