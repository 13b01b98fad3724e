"""Lookups in a table: its columns are free; split rows (the vocabulary) need an implementation that masks."""

from __future__ import annotations

import torch

from autopar.ir.program.operators.embedding_bags import EMBEDDING_BAGS, MODES, RAGGED_EMBEDDING_BAGS
from autopar.ir.sharding.operation import Call, Implementation, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Answer, Entry, rule, term

aten = torch.ops.aten

ROWS = frozenset({"k"})


def rows_alone(inputs: int, outputs: int) -> int:
    """A lookup reads the rows it needs, not the table."""
    return outputs + outputs


def embedding(call: Call) -> Answer:
    """The row of `weight` for every index; linear in the table."""
    if call["scale_grad_by_freq"] or call["sparse"]:
        return None
    implementation = Implementation("embedding:vocabulary_parallel_embedding", ROWS, padded=ROWS)
    return OpRule("~k o, ... -> ... o", (implementation,), moved_bytes=rows_alone)


def embedding_bags(call: Call) -> OpRule:
    """Bags of one size. Sums and means may be split by the rows of the table, plain sums by places in a bag, too."""
    mode, weighted = MODES[call["mode"]], call["per_sample_weights"] is not None
    rows, mark = (WHOLE, "") if mode == "max" else ("k", "~")
    places = "l" if mode == "sum" and not weighted else WHOLE  # weighted, it would pass for a matrix product
    weights = [term(["b", places], "~")] if weighted else []
    text = rule([term([rows, "o"], mark), term(["b", places]), *weights], [term(["b", "o"])])
    by_rows = Implementation("embedding:vocabulary_parallel_bags", ROWS, padded=ROWS)
    size = call["indices"].shape[1]
    return OpRule(text, (by_rows,) if rows == "k" else (), moved_bytes=lambda inputs, outputs: (size + 1) * outputs)


def ragged_embedding_bags(call: Call) -> str:
    """Bags of any sizes: which of them an index belongs to is known of all together."""
    mark = "" if MODES[call["mode"]] == "max" else "~"
    weights = [f"{mark}_"] if call["per_sample_weights"] is not None else []
    return rule([f"{mark}_ o", WHOLE, WHOLE, *weights], ["_ o"])


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.embedding.default: embedding,
    EMBEDDING_BAGS: embedding_bags,
    RAGGED_EMBEDDING_BAGS: ragged_embedding_bags,
}
