"""Rows of experts in presets: calls between both ends of a block follow what an axis does to its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from autopar.strategies.presets.split import FREE, Wish
from autopar.strategies.roles import RoledCall, RoledProgram, Value

ROWS, IDS = 0, 2
"""Outputs of `dispatch`."""


@dataclass(frozen=True, slots=True)
class InBlock:
    """Membership of a call in a block of experts."""

    dispatch: str
    """The call where the block begins."""
    rows: str | None
    """The factor of its rows; None at both ends, whose tokens have one."""


def in_blocks_of_experts(graph: RoledProgram) -> Mapping[str, InBlock]:
    """The calls of blocks of sorted experts, both ends among them; looked for once."""
    facts = graph.program.facts
    if "blocks of experts" not in facts:
        facts["blocks of experts"] = _in_blocks(graph)
    return facts["blocks of experts"]


def _in_blocks(graph: RoledProgram) -> Mapping[str, InBlock]:
    found: dict[str, InBlock] = {}
    begun: dict[Value, str] = {}
    for call in graph.learned:
        if call.weight_only:
            continue
        if call.call.target is DISPATCH:
            found[call.name] = InBlock(call.name, None)
            begun |= {(call.name, output): call.name for output in (ROWS, IDS)}
            continue
        held = [
            (begun[value], term.dims[0][0])
            for value, term in zip(call.inputs, call.in_terms, strict=True)
            if value in begun
        ]
        if held:
            dispatch, rows = held[0]
            is_end = call.call.target is COMBINE
            found[call.name] = InBlock(dispatch, None if is_end else rows)
            begun |= {} if is_end else {(call.name, output): dispatch for output in range(len(call.out_terms))}
    return found


def along_rows(graph: RoledProgram, wish: Wish) -> Wish:
    """The same wish, but for calls on rows, which are split where the wish splits the tokens of their block."""
    blocks = in_blocks_of_experts(graph)

    def found(call: RoledCall) -> str | None:
        block = blocks.get(call.name)
        tokens = FREE if block is None or block.rows is None else wish(graph.calls[block.dispatch])
        if block is None or tokens == FREE:
            return wish(call)
        return block.rows if tokens else None

    return found
