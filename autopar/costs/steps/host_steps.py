"""The step of an optimizer on the host, as tasks: its gradients, that leave in the backward, and what the step copies.

Where the device is the host itself, all of it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.memory.model import MemoryModel
from autopar.costs.pricing.offload import HostStep, host_step
from autopar.costs.pricing.operations import local_elements
from autopar.costs.steps.host_copies import DOWN, UP
from autopar.costs.steps.tasks import Tasks

HOST = "host"
"""The stream of an optimizer's steps on the host."""


class HostSteps:
    """The steps of a step's parameters; of an optimizer on the device there are none."""

    def __init__(self, memory: MemoryModel, choices: Sequence[int], tasks: Tasks) -> None:
        self._space, self._choices, self._tasks = memory.space, choices, tasks
        self._left: dict[int, int] = {}
        """Parameter → the copy of its gradient, which has left in the backward."""

    def take(self, number: int) -> None:
        """Take a parameter's gradient, and offload it if gradients are offloaded."""
        if not self._space.optimizer.sends_gradients:
            return
        row, (elements, step) = self._space.decisions[number].name, self._host_step_of(number)
        if self._space.hardware.is_host:
            self._tasks.compute(DOWN, elements * step.before, row)
        else:
            self._left[number] = self._tasks.overlapped(DOWN, DOWN, elements * step.before, row)
        if self._space.optimizer.in_backward:
            self._step(number)

    def step(self, number: int) -> None:
        """Run a parameter's optimizer step after the backward, unless it ran during it."""
        if not self._space.optimizer.in_backward:
            self._step(number)

    def _step(self, number: int) -> None:
        row, (elements, step) = self._space.decisions[number].name, self._host_step_of(number)
        if self._space.hardware.is_host:
            each = elements * (step.seconds - step.before)
            self._tasks.compute("optimizer", each + self._space.hardware.op_latency_s, row)
            return
        behind = [self._left[number]] if number in self._left else []
        if step.down:
            behind.append(self._tasks.overlapped(DOWN, DOWN, elements * step.down, row))
        stepping = elements * step.host + self._space.hardware.op_latency_s
        host = self._tasks.overlapped(HOST, HOST, stepping, row, behind=behind)
        self._tasks.overlapped(UP, UP, elements * step.up, row, [host])

    def _host_step_of(self, number: int) -> tuple[int, HostStep]:
        """Return the elements of a parameter on a device, and what each of them takes."""
        decision, space = self._space.decisions[number], self._space
        info, layout = decision.node.meta["tensor"], decision.candidates.strategies[self._choices[number]].outputs[0]
        return local_elements(info, layout, space.mesh.sizes), host_step(info, space.hardware, space.optimizer)
