"""Agreement of ranks before they run."""

from __future__ import annotations

import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.ranks.agreement import on_all_ranks
from tests.support.ranks import Ranks, mesh


def _apart() -> str:
    lines = ["x", "relu" if dist.get_rank() else "silu"]
    try:
        on_all_ranks(lambda: lines, lambda found: f"graph {found[1]}", mesh((2,), ("dp",)), list)
    except InputError as error:
        return str(error)
    return "nothing was raised"


def test_graphs_that_differ_are_shown_where_they_part(ranks: Ranks) -> None:
    for message in ranks.run(_apart):
        assert message == (
            "the ranks were called differently: rank 0 with graph silu; rank 1 with graph relu. They part at node 1: "
            "silu and relu. Every rank needs the same model and inputs of the same global shapes: give each the whole "
            "batch, or DTensors."
        )


def test_graphs_that_are_equal_are_given_back(ranks: Ranks) -> None:
    assert ranks.run(_alike) == [["x"]] * 2


def _alike() -> list[str]:
    return on_all_ranks(lambda: ["x"], str, mesh((2,), ("dp",)), list)
