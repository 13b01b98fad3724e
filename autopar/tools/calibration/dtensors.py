"""Seconds that an optimizer's step takes longer for each parameter because it is a DTensor (`Hardware.dtensor_s`).

PyTorch dispatches each operation on a DTensor through Python, which finds the layouts and unwraps the local tensors.
AdamW is torch's default of the device, a loop on a CPU and foreach on CUDA, unless the effort names another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.tools.calibration.timing import Timer

PARAMETERS = 32
ELEMENTS = 8  # few, so that only dispatch takes time


def dtensor_seconds(timer: Timer) -> float:
    """Return the seconds per parameter by which a step on DTensors is longer than one on plain tensors."""
    mesh = init_device_mesh(timer.device.type, (dist.get_world_size(),))
    kinds = (None, mesh)
    plain, dtensors = timer.median_seconds([_adamw_step(timer, each) for each in kinds], "optimizer on DTensors")
    return max(0.0, (dtensors - plain) / PARAMETERS)


def _adamw_step(timer: Timer, mesh: DeviceMesh | None) -> Callable[[], object]:
    """Return the AdamW step of small parameters, which are DTensors if a mesh is given."""

    def made() -> Tensor:
        values = torch.ones(ELEMENTS, device=timer.device)
        return values if mesh is None else DTensor.from_local(values, mesh, [Replicate()], run_check=False)

    parameters = [torch.nn.Parameter(made()) for _ in range(PARAMETERS)]
    for parameter in parameters:
        parameter.grad = made()
    return torch.optim.AdamW(parameters, fused=timer.effort.fused or None).step
