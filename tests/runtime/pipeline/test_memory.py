"""The memory that a pipeline's plan predicts for its ranks, compared with what a step on real ranks holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.models.named import named
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from autopar.tools.benchmarking.meters import held_in_training, peak_bytes
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
    compiled.to_empty(device="cpu")
    for parameter in compiled.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in compiled.buffers():  # of rotary embeddings, which no state dict has
        nn.init.ones_(buffer)
    same = torch.Generator().manual_seed(0)  # ranks have drawn weights of different sizes from their own
    batch = tuple(torch.randint(0, 200, value.shape, generator=same) for value in inputs)
    optimizer = torch.optim.AdamW(compiled.parameters())

    def held() -> Iterator[Tensor]:
        yield from held_in_training(compiled, optimizer)
        yield from batch

    compiled.train_step(*batch)
    optimizer.step()
    found = peak_bytes(lambda: compiled.train_step(*batch), optimizer.zero_grad, held)
    return found, compiled.plan.rank_bytes(on.get_local_rank("pp"))


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
