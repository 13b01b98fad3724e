"""Models in training whose steps are timed on every rank, from a common start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.costs.hardware.load import load, parse
from autopar.costs.hardware.profile import Hardware
from autopar.ir.sharding.mesh import Mesh
from autopar.tools.calibration.calibrate import calibrate
from autopar.tools.calibration.timing import BRIEF

WARM_UP = 3  # steps; the first ones plan, compile and fill the optimizer's state and the allocator


class TimedTraining:
    """An optimizer, what computes a loss and its gradients, and the seconds of the steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, forward_and_backward: Callable[[], Tensor]) -> None:
        self.optimizer = optimizer
        self._forward_and_backward = forward_and_backward
        self.seconds: list[tuple[float, float]] = []
        """Wall clock seconds and CPU seconds of each step."""
        self.loss = 0.0

    def step(self) -> tuple[float, float]:
        """Train one step from a common start; returns this rank's seconds by the clock and of the processor."""
        dist.barrier()
        start, processor_start = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        loss = self._forward_and_backward()
        self.optimizer.step()
        seconds = time.perf_counter() - start, time.process_time() - processor_start
        self.loss = float(loss.detach())
        return seconds


def train_in_turns(contestants: Iterable[TimedTraining], steps: int) -> None:
    """Train each a step after the other, and keep the seconds of the steps after those that warm up."""
    for turn in range(WARM_UP + steps):
        for each in contestants:
            seconds = each.step()
            if turn >= WARM_UP:
                each.seconds.append(seconds)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW with `foreach`.

    DTensor leaves parameters plain that it does not split; foreach takes the two kinds in groups of their own.
    """
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=1e-4, foreach=True)


def forward_and_backward(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """Return the loss of a model that returns it, after its backward."""
    loss = model(*inputs)
    loss.backward()
    return loss


def of_every_rank(value: Any) -> list[Any]:
    """Gather a value from every rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def profile_of(given: str | None, mesh: Mesh) -> Hardware:
    """Load a profile by its name or path, or calibrate this machine if none is given."""
    return load(given) if given else parse(calibrate(mesh, "cpu", BRIEF, f"this machine, {mesh}, measured before"))
