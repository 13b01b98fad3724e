"""Host time that DTensors cost a training step per parameter: `python -m benchmarks.dtensor_cost`.

    steps     AdamW of 10 to 200 parameters in each of its implementations, on DTensors and on plain tensors
    training  steps of chains of small linear layers that no benchmark suite has, on two gloo ranks: the preset
              data_parallel, whose parameters are plain, next to the same with one sharded bias, which makes all of
              them DTensors. The slope over the number of parameters is the cost of each, wrapping of gradients
              included; the bias's own collectives are the same for all lengths.

Both take the least CPU time of several interleaved runs, which is less sensitive to other load than the wall clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import autopar
from autopar.runtime.ranks.launch import World, on_ranks

COUNTS = (10, 50, 200)
DEPTHS = (8, 64)
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
REPETITIONS = 20
FEATURES = 8


def least(calls: list[Callable[[], object]]) -> list[float]:
    """Return the least CPU seconds of each call, in turns."""
    found = [float("inf")] * len(calls)
    for _ in range(REPETITIONS):
        for number, call in enumerate(calls):
            start = time.process_time()
            call()
            found[number] = min(found[number], time.process_time() - start)
    return found


def optimizer_step(count: int, options: dict[str, bool], distributed: bool) -> Callable[[], object]:
    """Return the AdamW step of so many small parameters."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def made() -> Tensor:
        values = torch.ones(FEATURES, FEATURES)
        return DTensor.from_local(values, mesh, [Replicate()], run_check=False) if distributed else values

    parameters = [nn.Parameter(made()) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = made()
    return torch.optim.AdamW(parameters, foreach=options.get("foreach"), fused=options.get("fused")).step


def training_step(depth: int, distributed: bool) -> Callable[[], object]:
    """Return a training step of a chain of linear layers, data parallel over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(depth)))
    if distributed:
        autopar.annotate(model, "0.bias", storage="dp")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    x_BF = torch.randn(8, FEATURES)
    compiled = autopar.compile(model, mesh, (x_BF,), strategy="data_parallel")
    optimizer = torch.optim.AdamW(compiled.parameters())
    assert any(isinstance(each, DTensor) for each in compiled.parameters()) == distributed

    def step() -> None:
        optimizer.zero_grad()
        compiled(x_BF).pow(2).mean().backward()
        optimizer.step()

    return step


def compared(plain: float, dtensors: float) -> str:
    """Return both times as text."""
    return f"{plain * 1e3:8.3f} ms plain  {dtensors * 1e3:8.3f} ms DTensors"


def measured() -> list[str]:
    """Return the lines of the report, measured on this rank."""
    lines = []
    for name, options in IMPLEMENTATIONS.items():
        for count in COUNTS:
            plain, dtensors = least([optimizer_step(count, options, kind) for kind in (False, True)])
            each = (dtensors - plain) / count
            text = f"AdamW, {name:8} {count:4} parameters  {compared(plain, dtensors)}"
            lines.append(f"{text}  {each * 1e6:6.1f} µs each")
    more = []
    for depth in DEPTHS:
        plain, dtensors = least([training_step(depth, kind) for kind in (False, True)])
        more.append(dtensors - plain)
        lines.append(
            f"training, {2 * depth:4} parameters  {plain * 1e3:8.3f} ms plain  {dtensors * 1e3:8.3f} ms DTensors"
        )
    slope = (more[1] - more[0]) / (2 * (DEPTHS[1] - DEPTHS[0]))
    lines.append(f"training: {slope * 1e6:.1f} µs for each parameter")
    return lines


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, 2 gloo ranks")
    print("\n".join(on_ranks(World(2, "cpu"), measured, ())))
