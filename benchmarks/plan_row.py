"""Plan one model on one mesh and print, as one line of JSON, what each stage took.

`plan_speed` runs this in a process of its own for every row, so that memory and caches are the row's own.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autopar
from autopar.compiler import offline
from autopar.errors import InfeasibleError
from autopar.models.catalogue import built_in
from autopar.planning import planner, request
from autopar.sharding.mesh import Mesh
from benchmarks.unet import unet

AXES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp")}
"""Names of the axes by their number."""
STAGES = {"trace": offline, "build_space": request, "make_plan": planner}
"""The calls of `autopar.plan` that are timed, and the modules that make them."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is planned: a model by name with so many layers (None: its own), inputs, mesh and bytes per device."""

    model: str
    mesh: tuple[int, ...]
    batch: int
    sequence: int
    layers: int | None = None
    memory: int | None = None
    hardware: str = "h100"

    @classmethod
    def from_json(cls, text: str) -> Row:
        values = json.loads(text)
        return cls(**{**values, "mesh": tuple(values["mesh"])})


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall seconds of each stage, CPU seconds of the whole, and what was planned; None where a planner has no such.

    `step` is the predicted step in seconds, `rss_bytes` the most that the process had.
    """

    capture: float
    build: float
    solve: float
    total: float
    cpu: float
    rss_bytes: int
    nodes: int
    step: float | None = None
    gap: float | None = None
    peak_bytes: int | None = None
    solver: str = ""


def measure(row: Row) -> Measured:
    """Plan the row: fp32 parameters on the meta device under bf16 autocast, as mixed precision trains.

    Imports and the making of the model are not counted; the first use of `torch.export` is.
    """
    model, inputs = example(row)
    mesh = Mesh(dict(zip(AXES[len(row.mesh)], row.mesh, strict=True)), hardware=row.hardware)
    cpu, start = time.process_time(), time.perf_counter()
    with timed(STAGES) as (seconds, results), torch.autocast("cpu", torch.bfloat16):
        try:
            plan = autopar.plan(model, mesh, inputs, memory=row.memory)
            outcome: dict[str, Any] = {
                "step": plan.seconds,
                "gap": plan.gap,
                "peak_bytes": plan.peak_bytes,
                "solver": plan.solver,
            }
        except InfeasibleError:
            outcome = {"solver": "infeasible"}
    return Measured(
        *(seconds[name] for name in STAGES),
        total=time.perf_counter() - start,
        cpu=time.process_time() - cpu,
        rss_bytes=peak_rss(),
        nodes=len(results["build_space"].program.graph.nodes),
        **outcome,
    )


def example(row: Row) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of a row and its inputs, on the meta device; the layers of the UNet are its levels."""
    if row.model == "unet":
        return unet(row.batch) if row.layers is None else unet(row.batch, row.layers)
    return built_in(row.model, row.batch, row.sequence, row.layers)


@contextmanager
def timed(owners: Mapping[str, Any]) -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    """The wall seconds that calls of each name (function → its module or class) take in all, and what the last gave."""
    seconds, results = dict.fromkeys(owners, 0.0), {}

    def timer(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                results[name] = call(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start
            return results[name]

        return timed_call

    with ExitStack() as stack:
        for name, owner in owners.items():
            stack.enter_context(mock.patch.object(owner, name, timer(name, getattr(owner, name))))
        yield seconds, results


def peak_rss() -> int:
    """The most bytes of memory that this process has had."""
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Row.from_json(sys.argv[1])))))
