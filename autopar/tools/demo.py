"""The demonstration: a small language model trained on gloo ranks of this machine and on one process.

The parent trains alone first, then starts the ranks; rank 0 prints, and its measurements come back. The run succeeds
where the losses agree and the bytes that moved are the bytes that the plan predicted.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.api import entry
from autopar.console.units import format_bytes, format_seconds
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import LanguageModel, language_model, require_transformers
from autopar.models.corpus import batches, library_text
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.ranks.launch import World, on_ranks

LEARNING_RATE = 1e-3
RELATIVE_TOLERANCE = 1e-3  # relative error of a loss: fp32 sums in another order, amplified by earlier steps
PRELOADED = ["autopar.tools.demo"]


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Settings of the demonstration: mesh, number of steps, size of the model and of the data, and seed."""

    mesh: Mesh
    steps: int = 30
    layers: int = 4
    batch: int = 8
    sequence: int = 128
    seed: int = 0

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Return the (ids, labels) of every step, the same in every process."""
        return list(batches(library_text(), self.batch, self.sequence, self.steps, self.seed))

    def model(self) -> LanguageModel:
        """Return the untrained model, the same in every process."""
        torch.manual_seed(self.seed)
        return language_model("demo", self.layers)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of rank 0: losses, seconds per step, bytes by (collective, axis), bytes per rank."""

    losses: list[float]
    seconds: list[float]
    predicted: list[tuple[str, str, int]]
    counted: list[tuple[str, str, int]]
    predicted_peak: int
    state: list[int]
    process: list[int]


def run(settings: DemoRun) -> bool:
    """Train alone, then on the ranks, and print both; whether losses and bytes are as they should be.

    Raises RankError where a rank fails, after ending the others.
    """
    require_transformers()
    print(f"one process, {settings.steps} steps, for comparison …", flush=True)
    model = settings.model()
    alone, seconds = _train(model, _adamw(model), settings.data())
    print(f"  loss {alone[0]:.4f} → {alone[-1]:.4f}, {format_seconds(statistics.median(seconds))} a step\n", flush=True)
    return _report(_start(settings, alone), alone, statistics.median(seconds))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[tuple[Tensor, Tensor]],
    after: Callable[[int, float, float], None] | None = None,
) -> tuple[list[float], list[float]]:
    """Return the losses and seconds of every step; call `after(step, loss, seconds)` after each."""
    losses, seconds = [], []
    for step, (ids, labels) in enumerate(data):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if after:
            after(step, losses[-1], seconds[-1])
    return losses, seconds


def _start(settings: DemoRun, alone: list[float]) -> Measured:
    """Run the ranks to their end. The first that fails ends them all."""
    return on_ranks(World(settings.mesh.num_devices), _train_on_mesh, (settings, alone), PRELOADED)


def _train_on_mesh(settings: DemoRun, alone: Sequence[float]) -> Measured:
    speaks = dist.get_rank() == 0
    mesh = init_device_mesh("cpu", settings.mesh.sizes, mesh_dim_names=settings.mesh.names)
    data = settings.data()
    start = time.perf_counter()
    model = entry.compile(settings.model(), mesh, example_inputs=data[0])
    if speaks:
        print(f"{model.plan}\n\nplanned and compiled in {format_seconds(time.perf_counter() - start)}\n", flush=True)

    def show(step: int, loss: float, seconds: float) -> None:
        if speaks and (step % 5 == 0 or step == settings.steps - 1):
            line = f"step {step:3d}   loss {loss:.6f}   alone {alone[step]:.6f}   {format_seconds(seconds)}"
            print(line, flush=True)

    assert isinstance(model, ParallelModule), "the demo has no pipeline"
    optimizer = _adamw(model)
    with record_traffic() as counted:
        losses, seconds = _train(model, optimizer, data, show)
    return Measured(
        losses=losses,
        seconds=seconds,
        predicted=_traffic_as_json(model.plan.traffic, settings.steps),
        counted=_traffic_as_json(counted.num_bytes),
        predicted_peak=model.plan.peak_bytes,
        state=_of_every_rank(_state_bytes(optimizer)),
        process=_of_every_rank(_process_bytes()),
    )


def _traffic_as_json(traffic: Mapping[tuple[str, str], int], times: int = 1) -> list[tuple[str, str, int]]:
    """Return traffic as JSON holds it, without zeros, in a fixed order."""
    return [(*key, num_bytes * times) for key, num_bytes in sorted(traffic.items()) if num_bytes]


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients and optimizer state on this rank."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    tensors = (*parameters, *gradients, *state)
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def _process_bytes() -> int:
    """Return the peak memory of this process, imports included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kilobytes on Linux


def _of_every_rank(value: int) -> list[int]:
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _report(measured: Measured, alone: Sequence[float], alone_seconds: float) -> bool:
    """Print the comparison; whether the losses agree and the bytes are equal."""
    differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(measured.losses, alone, strict=True)]
    agree = all(difference <= RELATIVE_TOLERANCE for difference in differences)  # False for a loss that is no number
    difference, steps = max(differences), len(alone)
    equal = measured.predicted == measured.counted
    median = format_seconds(statistics.median(measured.seconds))
    lines = (
        f"losses      {'agree' if agree else 'DIFFER'}: largest relative difference {difference:.1e} in {steps} steps, "
        f"tolerance {RELATIVE_TOLERANCE:g}",
        f"step time   {median} (median), one process {format_seconds(alone_seconds)}",
        f"memory      {_range(measured.state)} per rank in parameters, gradients and Adam's moments, "
        f"{format_bytes(measured.predicted_peak)} predicted with activations,",
        f"            {_range(measured.process)} of process with all imports",
        f"bytes       {'as predicted' if equal else 'NOT AS PREDICTED'}, per step and rank:",
        _traffic_table(measured, steps),
    )
    print("", *lines, sep="\n", flush=True)
    return agree and equal


def _range(values: Sequence[int]) -> str:
    low, high = format_bytes(min(values)), format_bytes(max(values))
    return low if low == high else f"{low} to {high}"


def _traffic_table(measured: Measured, steps: int) -> str:
    predicted = {(collective, axis): num_bytes for collective, axis, num_bytes in measured.predicted}
    counted = {(collective, axis): num_bytes for collective, axis, num_bytes in measured.counted}
    table = [
        [*key, f"{predicted.get(key, 0) / steps:,.0f}", f"{counted.get(key, 0) / steps:,.0f}"]
        for key in sorted({*predicted, *counted})
    ]
    headers = ["collective", "axis", "predicted bytes", "counted bytes"]
    return tabulate(table, headers=headers, colalign=("left", "left", "right", "right"), disable_numparse=True)
