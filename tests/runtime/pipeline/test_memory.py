"""The memory that a pipeline's plan predicts for its ranks, compared with what a step on real ranks holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.models.named import named
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from tests.support.measured_bytes import filled, peak_of_step
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh


def _measured(schedule: str, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes at the highest moment of the second step on this rank, and those of the plan."""
    axes = ("pp", "dp")[: 1 if dist.get_world_size() == 2 else 2]
    model, inputs = named("tiny-llama", 32, 128)
    assert isinstance(inputs, tuple)
    on = mesh((2,) if len(axes) == 1 else (2, 2), axes)
    compiled = autopar.compile(model, on, inputs, microbatches=4, **by_flag(schedule=schedule, **options))
    assert isinstance(compiled, PipelineModule)
    filled(compiled)
    same = torch.Generator().manual_seed(0)  # ranks have drawn weights of different sizes from their own
    batch = tuple(torch.randint(0, 200, value.shape, generator=same) for value in inputs)
    return peak_of_step(compiled, batch, in_one_call=True), compiled.plan.rank_bytes(on.get_local_rank("pp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "schedule", "options"),
    [
        (2, "1f1b", {}),
        (2, "gpipe", {}),
        (2, "zbv", {}),
        (2, "1f1b", {"recompute": "full"}),
        (4, "1f1b", {"strategy": "zero3"}),
    ],
)
def test_ranks_hold_what_the_plan_predicts(ranks: Ranks, world: int, schedule: str, options: dict[str, Any]) -> None:
    for found, predicted in ranks.run(_measured, schedule, options, world_size=world):
        assert predicted == pytest.approx(found, rel=0.1)
