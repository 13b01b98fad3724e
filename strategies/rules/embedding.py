"""Lookups in a table: its columns are free; split rows (the vocabulary) need an implementation that masks."""

from __future__ import annotations

import torch

from autopar.sharding.operation import Call, Implementation, OpRule
from autopar.strategies.notation import Answer, Entry

aten = torch.ops.aten


def rows_alone(inputs: int, outputs: int) -> int:
    """A lookup reads the rows it needs, not the table."""
    return outputs + outputs


def embedding(call: Call) -> Answer:
    """The row of `weight` for every index; linear in the table."""
    if call["scale_grad_by_freq"] or call["sparse"]:
        return None
    implementation = Implementation(
        "embedding:vocabulary_parallel_embedding", frozenset({"k"}), padded=frozenset({"k"})
    )
    return OpRule("~k o, ... -> ... o", (implementation,), moved_bytes=rows_alone)


RULES: dict[torch._ops.OpOverload, Entry] = {aten.embedding.default: embedding}
