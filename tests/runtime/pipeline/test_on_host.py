"""Stages whose layers send what they save to the host: trained as in one process, with the bytes that are planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.tools.benchmarking.meters import held_in_training
from tests.support.host_bytes import DeviceBytes, counted
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.pipeline_training import PipelineCase, check
from tests.support.ranks import Ranks, mesh
from tests.support.towers import tower

HOSTED = replace(SLOW_DEVICES, host_link_bytes_per_s=1e8, host_memory_bytes_per_s=1e8)


def on_host(family: str, mesh_name: str, schedule: str, **options: Any) -> PipelineCase:
    return PipelineCase(family, mesh_name, schedule, options={"hardware": HOSTED, "offload": "activations", **options})


CASES = [
    on_host("llama", "pp2", "interleaved_1f1b"),
    on_host("llama", "pp2", "gpipe"),
    on_host("llama", "pp2xdp2", "1f1b", strategy="zero3"),
    on_host("llama", "pp4", "interleaved_1f1b", offload="both"),
    on_host("gpt2", "pp2xtp2", "1f1b"),
    on_host("bart", "pp2", "1f1b"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_train_as_one_process(ranks: Ranks, case: PipelineCase) -> None:
    check(ranks, case)


class Scored(nn.Module):
    """A tower that gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.layers(x_BD).square().mean()


@dataclass(slots=True)
class Measured:
    """Losses, recompute modes and peak bytes of a rank; pairs of bytes are (measured in the second step, planned)."""

    losses: list[float]
    modes: set[str]
    device: tuple[int, int]
    host: tuple[int, int]
    left: int
    """Bytes on the host when the step is over."""


def measured(schedule: str, options: dict[str, Any]) -> Measured:
    axes = ("pp", "dp")[: 1 if dist.get_world_size() == 2 else 2]
    on = mesh((2,) * len(axes), axes)
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    specified = {"schedule": schedule, "microbatches": 4, "optimizer": "sgd", "hardware": HOSTED, **options}
    model: Any = autopar.compile(Scored(), on, (x,), **by_flag(**specified))
    optimizer = model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def held() -> Iterator[Tensor]:
        yield from held_in_training(model, optimizer)
        yield x
        for runner in model._runners.values():
            for stage in getattr(runner, "scheduled", ()):
                for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                    yield from (info.buffer for info in infos if info.buffer is not None)

    losses = [model.train_step(x).item()]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    with counted() as host:
        live = DeviceBytes(held(), host)
        live.look()
        with live:
            losses.append(model.train_step(x).item())
    rank = on.get_local_rank("pp")
    gc.collect()
    own = [model.plan.stages[number].plan for number in model.plan.schedule.stages_of(rank)]
    whole = 0 if rank == 0 else x.nbytes  # the batch that the rank was called with, and whose samples it does not take
    return Measured(
        losses,
        {mode for plan in own for mode in plan.recompute.values()},
        (live.highest - whole, model.plan.rank_bytes(rank)),
        (host.highest, sum(model.plan.rank_host(rank).values())),
        host.now,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "schedule", "options"),
    [
        (2, "interleaved_1f1b", {}),
        pytest.param(2, "1f1b", {}, marks=pytest.mark.slow),
        pytest.param(2, "gpipe", {}, marks=pytest.mark.slow),
        pytest.param(2, "pipedream", {}, marks=pytest.mark.slow),
        pytest.param(4, "1f1b", {"strategy": "zero3"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_and_hosts_hold_what_the_plan_predicts(
    ranks: Ranks, world: int, schedule: str, options: dict[str, Any]
) -> None:
    kept, away = (
        ranks.run(measured, schedule, {**options, "offload": each}, world_size=world, timeout=240)
        for each in ("none", "activations")
    )
    for found, before in zip(away, kept, strict=True):
        assert found.losses == before.losses
        assert found.modes == {OFFLOAD} and not before.modes
        assert found.device[1] == pytest.approx(found.device[0], rel=0.1)
        assert before.device[1] == pytest.approx(before.device[0], rel=0.1)
        assert found.host[0] == found.host[1] > 0 and found.left == 0
        assert found.device[0] < 0.75 * before.device[0]


def by_layers() -> tuple[list[float], list[float], int]:
    """Losses of stages whose layers are compiled, and of plain ones; bytes of the first on the host."""
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))

    def trained(compiles: bool) -> tuple[list[float], int]:
        specified: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "optimizer": "sgd", "hardware": HOSTED}
        model: Any = autopar.compile(Scored(), mesh((2,), ("pp",)), (x,), **by_flag(offload="activations", **specified))
        if compiles:
            model.compile(backend="aot_eager", fullgraph=True, regional=True)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        with counted() as host:
            for _ in range(2):
                optimizer.zero_grad()
                losses.append(model.train_step(x).item())
                optimizer.step()
        return losses, host.highest

    torch._dynamo.reset()
    (found, sent), (expected, _) = trained(True), trained(False)
    torch._dynamo.reset()
    return found, expected, sent


@pytest.mark.slow
def test_stages_whose_layers_are_compiled_leave_what_they_save(ranks: Ranks) -> None:
    for found, expected, sent in ranks.run(by_layers, world_size=2, timeout=240):
        assert found == pytest.approx(expected, rel=1e-5) and sent > 0
