"""Scaled dot product attention: batch, heads and queries are free.

Query heads share key and value heads in groups of r, "(h r)", or all of them share one. The key sequence is always
whole; where a causal call's queries are split, each part builds its own mask. Biases and masks are broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.sharding.operation import Call, Implementation, OpRule
from autopar.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, batch_names, broadcast, rule, term

aten = torch.ops.aten


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
    # Scores and their product with the values: a multiplication and an addition per query, key and feature.
    flops = 2 * math.prod(scores) * (query[-1] + value[-1])
    if call["dropout_p"] > 0:
        implementation = Implementation("dropout:attention_with_dropout", factors=None, random=True)
        return OpRule(text, (implementation,), flops=flops, efficiency="attention")
    if call["is_causal"]:
        by_queries = Implementation("attention:causal_attention", frozenset({"s"}), padded=frozenset({"s"}))
        return OpRule(text, (by_queries,), flops=flops, efficiency="attention")
    return OpRule(text, flops=flops, efficiency="attention")


RULES: dict[torch._ops.OpOverload, Entry] = {aten.scaled_dot_product_attention.default: attention}

BY_NAME: dict[str, Entry] = {
    "transformers.models.yoso.modeling_yoso.YosoCumulation": "b s, b t, b s _, b t _, b t e -> b s e",
}
"""autograd.Functions of libraries that need not be there; YOSO's has masks, queries, keys and values."""
