"""Moves between layouts in a plan: no annotation requests such a move, so a manual plan lists it."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.space.space import Space, TensorEdge
from autopar.ir.program.calls import module_of


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
