"""Expert rows of a space: the decisions that have them, and those that say whether they are divided by expert.

A rank's rows are S(0) whether ranks divide tokens or experts. The two differ in the layout of a block's counts, that
is, the number of rows of each expert: S(0) if ranks have rows of their own experts, P if they have rows of their own
tokens.
"""

from __future__ import annotations

from autopar.costs.space.space import ExpertRows, Space, TensorEdge
from autopar.ir.program.calls import source_of
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from autopar.ir.program.program import tensor_inputs

ROWS, COUNTS, IDS = range(3)
"""Outputs of `dispatch`."""


def rows_of_experts(space: Space) -> dict[int, ExpertRows]:
    """Map each decision to the rows that it takes and gives."""
    found: dict[int, ExpertRows] = {}
    shared_reshards = {
        edge.source: edge.target for edge in space.edges if _brings_counts_to_shared_reshard(space, edge)
    }
    for number, decision in enumerate(space.decisions):
        if decision.kind != "call":
            continue
        if decision.node.target is DISPATCH:
            counts = (shared_reshards[number], 0) if number in shared_reshards else (number, COUNTS)
            found[number] = ExpertRows(frozenset(), frozenset((ROWS, IDS)), *counts)
            continue
        sources = [(space.index[node.name], output) for node, output in map(source_of, tensor_inputs(decision.node))]
        arriving = {place: found[n] for place, (n, output) in enumerate(sources) if _gives_rows(found, n, output)}
        for rows in arriving.values():  # rows of one block, which decides its counts once
            num_outputs = 0 if decision.node.target is COMBINE else len(decision.candidates.strategies[0].outputs)
            outputs = frozenset(range(num_outputs))
            found[number] = ExpertRows(frozenset(arriving), outputs, rows.counts, rows.position)
    for edge in space.edges:
        if space.decisions[edge.target].kind == "shared_reshard" and _gives_rows(
            found, edge.source, edge.source_output
        ):
            rows = found[edge.source]
            found[edge.target] = ExpertRows(frozenset((0,)), frozenset((0,)), rows.counts, rows.position)
    return found


def padded_share(space: Space) -> float | None:
    """Return the rows that messages are padded to, as a multiple of a device's share; None if they are not padded."""
    ends = [decision.candidates.call for decision in space.decisions if decision.node.target is DISPATCH]
    return ends[0]["padded"] if ends and ends[0] is not None else None


def _gives_rows(found: dict[int, ExpertRows], number: int, output: int) -> bool:
    return number in found and output in found[number].outputs


def _brings_counts_to_shared_reshard(space: Space, edge: TensorEdge) -> bool:
    source, target = space.decisions[edge.source], space.decisions[edge.target]
    return source.node.target is DISPATCH and edge.source_output == COUNTS and target.kind == "shared_reshard"
