"""A model in training whose steps are timed on every rank, from a common start."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


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
