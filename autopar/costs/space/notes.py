"""Notes of a plan on moves that no annotation requests, and on causal attention whose queries are split in order.

If positions do not divide for a zigzag, the last of n devices computes (2n-1)/n² of the scores, where each would
compute 1/n (see `strategies.zigzag`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.costs.space.space import Space, TensorEdge
from autopar.ir.program.calls import module_of
from autopar.strategies.roles import RoledProgram
from autopar.strategies.zigzag import QUERIES, later_see_more, num_pieces


def notes_on_moves(space: Space, choices: Sequence[int]) -> tuple[str, ...]:
    """Return a note for each activation that a plan gathers or exchanges on its way to a call.

    Sums of partial values belong to the call that makes these, as the all-reduce behind a row, and are no such moves.
    """
    notes: dict[str, None] = {}
    for edge in space.edges:
        path = space.path(edge, choices)
        if edge.tensor.bucketed or not any(move.source.is_split for move in path.moves):
            continue
        source, target = _place(space, edge.source), _place(space, _consumer(space, edge))
        for each in path.transfers:
            if not each.backward:
                notes[f"moved between layouts: {each.collective} over {each.axis} from {source} to {target}"] = None
    return tuple(notes)


def _consumer(space: Space, edge: TensorEdge) -> int:
    """Return the first decision behind the shared reshards that an edge leads to."""
    number = edge.target
    while space.decisions[number].kind == "shared_reshard":
        number = next(each.target for each in space.edges if each.source == number)
    return number


def _place(space: Space, number: int) -> str:
    decision, call = space.decisions[number], space.decisions[number].candidates.call
    module = module_of(decision.node)
    if module and call is not None:
        return f"{call.name} of {module}"
    return module or decision.name


def notes_on_order(space: Space, choices: Sequence[int]) -> tuple[str, ...]:
    """Return a note for each number of positions that is split so."""
    calls = RoledProgram.of(space.program).calls
    return tuple(
        dict.fromkeys(
            note
            for number, decision in enumerate(space.decisions)
            if decision.kind == "call" and later_see_more(calls[decision.name])
            if (note := _note(space, number, choices[number]))
        )
    )


def _note(space: Space, number: int, choice: int) -> str:
    candidates, sizes = space.decisions[number].candidates, [space.mesh.size(axis) for axis in space.zigzag_axes]
    strategy, bound = candidates.strategies[choice], candidates.bound
    axes = strategy.axes_by_factor(space.mesh).get(QUERIES, ())
    assert bound is not None
    positions, parts = bound.sizes[QUERIES], math.prod(map(space.mesh.size, axes))
    pieces = max(num_pieces(sizes), 2 * parts)
    if parts == 1 or QUERIES in strategy.zigzag or positions % pieces == 0:
        return ""
    return (
        f"positions of causal attention are split in order over {', '.join(axes)}, and the last device computes up to "
        f"{2 - 1 / parts:.2f} times its share of the scores: {positions} positions do not divide into {pieces} chunks, "
        f"to be zigzag-sharded. Pad the sequences to {-(-positions // pieces) * pieces}."
    )
