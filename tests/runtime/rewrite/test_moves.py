"""The collective of a move: over one axis by its name, over joined ones by their name together."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.costs.pricing.moves import Move
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.collectives import layout_moves
from autopar.runtime.rewrite.moves import MoveCall, move_call

MESH = Mesh({"dp": 2, "sp": 2, "tp": 2})


@pytest.mark.parametrize(
    ("axes", "before", "after", "function", "arguments"),
    [
        ((2,), "I I S(0)", "I I R", layout_moves.all_gather, ("tp", 0, 256)),
        # The moves of a weight behind a shared reshard, if no bucket takes it.
        ((0, 1), "S(1) S(1) S(0)", "R R S(0)", layout_moves.all_gather, ("dp_sp", 1, 32)),
        ((0, 1), "I I S(0)", "R R S(0)", layout_moves.all_reduce_gradient, ("dp_sp",)),
    ],
)
def test_a_move_is_carried_out_over_its_axes(
    axes: tuple[int, ...], before: str, after: str, function: Any, arguments: tuple[Any, ...]
) -> None:
    move = Move(axes, Layout.parse(before), Layout.parse(after))
    assert move_call(move, (256, 32), MESH) == MoveCall(function, arguments, {})
