"""Notes of a plan on losses in tiles: the number of tiles, their rows, and the bytes of logits that remain."""

from __future__ import annotations

import math

from autopar.console.units import format_bytes
from autopar.costs.memory.model import MemoryModel
from autopar.ir.program.calls import module_of
from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY, rows_of_tiles
from autopar.ir.sharding.operation import Call
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.settings import PlanContext


def notes_on_losses(context: PlanContext, answer: Answer) -> tuple[str, ...]:
    """Return a note for each loss that is taken in tiles."""
    found = [
        _note(context.memory_model, number, answer.choices[number])
        for number, decision in enumerate(context.space.decisions)
        if decision.node.target is LINEAR_CROSS_ENTROPY and decision.kind == "call"
    ]
    return tuple(dict.fromkeys(found))


def _note(memory: MemoryModel, number: int, choice: int) -> str:
    decision = memory.space.decisions[number]
    strategy, bound, call = decision.menu.strategies[choice], decision.menu.bound, decision.menu.call
    assert bound is not None and isinstance(call, Call)
    sizes = strategy.local_sizes(bound.sizes, memory.space.mesh)
    classes = sizes.pop("o")
    tiles = rows_of_tiles(math.prod(sizes.values()), strategy.implementation.keywords["in_tiles"])
    row_bytes = classes * call["hidden"].dtype.itemsize
    return (
        f"the loss of {module_of(decision.node) or 'the forward'} is taken in {len(tiles)} "
        f"tile{'s' * (len(tiles) > 1)} of {tiles[0]} rows: {format_bytes(tiles[0] * row_bytes)} of logits at a time on "
        f"each device, of {format_bytes(sum(tiles) * row_bytes)}."
    )
