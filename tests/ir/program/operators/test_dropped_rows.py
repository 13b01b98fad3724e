"""The rows that ranks drop are counted on request."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.program.operators.capacity import DroppedRows
from tests.support.divided_experts import Form, batches, choices, forced, with_experts
from tests.support.options import by_flag
from tests.support.simulation.simulate import from_ranks, local_values, simulate
from tests.support.simulation.training import SLOW_DEVICES, planning_alone, unshare

pytest.importorskip("transformers")


def dropped(way: str, capacity_factor: float) -> list[float]:
    """The share that each of two ranks finds dropped."""
    batch = batches(1, length=6)[0]
    with simulate(2) as mode, planning_alone(mode, forced(choices(way))):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        options = {"hardware": SLOW_DEVICES, "capacity_factor": capacity_factor}
        model = autopar.compile(with_experts(Form()), mesh, batch, **by_flag(**options))
        unshare(model, mode)
        given = {name: from_ranks([value] * 2) for name, value in batch.items()}
        with autopar.record_dropped_rows() as found:
            model(**given)
        model(**given)
        assert len(found.dropped) == len(found.rows) == 1, "counted outside of the block, too"
        return [each.item() / found.rows[0] for each in local_values(found.dropped[0])]


@pytest.mark.slow
def test_ranks_count_the_rows_that_their_samples_drop() -> None:
    found = dropped("t", 0.5)
    assert found[0] != found[1] and sum(found) > 0
    assert sum(dropped("p", 0.5)) == pytest.approx(sum(found))
    assert dropped("t", 4.0) == [0.0, 0.0]


def test_the_share_is_that_of_all_blocks() -> None:
    assert DroppedRows([torch.tensor(1), torch.tensor(2)], [4, 8]).share == 0.25
    assert DroppedRows().share == 0.0
