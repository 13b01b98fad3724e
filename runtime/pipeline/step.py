"""A training step on a schedule of torch.distributed.pipelining: this rank's stages, and the loss for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B

from autopar.runtime.module.batches import loss_position
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.loss_scale import with_scaled_gradient
from autopar.runtime.module.stage import Stage
from autopar.runtime.module.stored import StoredModule
from autopar.runtime.pipeline.executable import Pipeline
from autopar.runtime.pipeline.stage import ScheduledStage
from autopar.runtime.recompute.random_state import RandomState


class ScheduledStep:
    """This rank's stages on a schedule."""

    def __init__(
        self, pipeline: Pipeline, root: StoredModule, group: dist.ProcessGroup, random_state: RandomState
    ) -> None:
        schedule = pipeline.schedule
        last = schedule.num_stages - 1
        position = loss_position(pipeline.programs[last])
        torch_class: Any = schedule.torch_class
        fuses = torch_class is Schedule1F1B
        self._stages = [Stage(each, root, random_state) for each in pipeline.executables.values()]
        self.scheduled = [
            ScheduledStage(stage, number, schedule.num_stages, position if number == last else None, group, fuses)
            for number, stage in zip(pipeline.executables, self._stages, strict=True)
        ]
        self._count, self._position = schedule.num_microbatches, position
        self._scale: Tensor | None = None
        self._group, self._last_rank = group, schedule.rank_of(last)
        self._schedule = torch_class(
            self.scheduled[0] if issubclass(torch_class, PipelineScheduleSingle) else self.scheduled,
            self._count,
            loss_fn=lambda loss, _: with_scaled_gradient(loss, self._scale) / self._count,
            scale_grads=False,
        )
        self._device = torch.device(self.scheduled[0].device)

    def step(self, batches: Sequence[Arguments], first_step: int, scale: Tensor | None = None) -> Tensor:
        """Run forward and backward of all micro-batches; return the mean of their losses, on every rank.

        Gradients are multiplied by `scale`.
        """
        self._scale = scale
        for stage in self._stages:
            stage.begin(batches, first_step)
        losses: list[Tensor] = []
        numbers = torch.arange(self._count)
        self._schedule.step(target=numbers, losses=losses, return_outputs=False)
        parts = torch.stack([loss.detach().float() for loss in losses]).sum() if losses else None
        arriving = None if parts is None else self._stages[-1].begin_sum(self._position, parts)
        for stage in self.scheduled:
            stage.finish_sends()
        for stage in reversed(self._stages):
            stage.finish()
        total = torch.zeros((), device=self._device) if arriving is None else arriving.arrived()
        dist.broadcast(total, group=self._group, group_src=self._last_rank)
        return total
