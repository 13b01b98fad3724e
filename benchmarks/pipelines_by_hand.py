"""A pipeline as users of torch.distributed.pipelining write it: stages cut by hand, on torch's own schedules.

Every rank makes the modules of its stages and no others. The first stage is given ids, the last one labels; stages say
nothing of shapes, which the first step finds out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.transformer_model import Size, Transformer, batch, loss_of, transformer

MICROBATCHES = 4
NO_LOSS = float("nan")  # what a rank without the last stage knows of it


def cuts(size: Size, num_stages: int) -> list[str]:
    """The layers with which stages of equally many layers begin, but for the first stage."""
    return [f"blocks.{stage * size.num_layers // num_stages}" for stage in range(1, num_stages)]


class HandStage(nn.Module):
    """Some layers of the transformer; the first stage has its embedding, and the last one its head."""

    def __init__(self, whole: Transformer, number: int, num_stages: int) -> None:
        super().__init__()
        begin, end = (each * len(whole.blocks) // num_stages for each in (number, number + 1))
        self.embedding = whole.embedding if number == 0 else None
        self.blocks = whole.blocks[begin:end]
        last = number == num_stages - 1
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Ids or hidden states → hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class ByHand:
    """This rank's stages, and a step of them."""

    def __init__(self, size: Size, mesh: DeviceMesh, stages_per_rank: int, compiled: bool) -> None:
        group, rank = mesh.get_group(), mesh.get_local_rank()
        num_stages = mesh.size() * stages_per_rank
        whole = transformer(size)
        numbers = range(rank, num_stages, mesh.size())
        modules = [HandStage(whole, number, num_stages) for number in numbers]
        if compiled:
            for module in modules:
                module.compile()
        self.model = nn.ModuleList(modules)
        stages: Any = [
            PipelineStage(module, number, num_stages, torch.device("cpu"), group=group)
            for module, number in zip(modules, numbers, strict=True)
        ]
        self._schedule = (
            Schedule1F1B(stages[0], MICROBATCHES, loss_of)
            if stages_per_rank == 1
            else ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_of)
        )
        ids, labels = batch(size)
        self._inputs = (ids,) if rank == 0 else ()
        self._labels = labels if rank == dist.get_world_size(group) - 1 else None

    def forward_and_backward(self) -> Tensor:
        """The mean loss of all micro-batches, NO_LOSS where this rank does not have the last stage."""
        losses: list[Tensor] = []
        self._schedule.step(*self._inputs, target=self._labels, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() if losses else torch.tensor(NO_LOSS)
