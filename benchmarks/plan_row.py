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
from autopar import plan as plan_offline
from autopar.errors import InfeasibleError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning import best_plan, request
from autopar.planning.options.groups import TIME_LIMIT
from benchmarks.wide_models import NAMES, wide_model

AXES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp")}
"""Names of the axes by their number."""
IN_STAGES = ("pp", "dp", "tp")
"""Axes of a mesh with a pipeline."""
CAPTURE = {"trace": request}
STAGES = {**CAPTURE, "build_space": request, "best_plan_of": best_plan}
"""The calls of `autopar.plan` that are timed, and the modules that make them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A model by name with so many layers (None: its own), inputs, mesh and bytes of tensors per device, to be planned.

    With a schedule the outermost axis is a pipeline's; a mesh of one number that is searched is so many devices.
    """

    model: str
    mesh: tuple[int, ...]
    batch: int
    sequence: int
    layers: int | None = None
    memory: int | None = None
    hardware: str = "h100"
    schedule: str | None = None
    microbatches: int | None = None
    pipeline: str | None = None
    """The axis of the pipelines that a search compares, too."""
    is_searched: bool = False
    time_limit: float = TIME_LIMIT

    @classmethod
    def from_json(cls, text: str) -> Row:
        values = json.loads(text)
        return cls(**{**values, "mesh": tuple(values["mesh"])})


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall seconds of each stage, CPU seconds of the whole, and what was planned; None where a planner has no such.

    Stages of pipelines are solved by calls of their own, which count in the whole alone.

    `step` is the simulated step in seconds, `rss_bytes` the most that the process had.
    """

    capture: float | None
    build: float | None
    solve: float | None
    total: float
    cpu: float
    rss_bytes: int
    nodes: int
    step: float | None = None
    gap: float | None = None
    peak_bytes: int | None = None
    solver: str = ""
    cpu_of_planning: float | None = None
    """CPU seconds without those of the capture."""


def measure(row: Row) -> Measured:
    """Plan the row: fp32 parameters on the meta device under bf16 autocast, as mixed precision trains.

    Imports and the making of the model are not counted; the first use of `torch.export` is.
    """
    model, inputs = example(row)
    cpu, start = time.process_time(), time.perf_counter()
    with (
        timed(STAGES) as (seconds, results),
        timed(CAPTURE, time.process_time) as (cpu_seconds, _),
        torch.autocast("cpu", torch.bfloat16),
    ):
        try:
            plan = _plan(row, model, inputs)
            outcome: dict[str, Any] = {
                "step": getattr(plan, "step_seconds", plan.seconds),
                "gap": plan.gap,
                "peak_bytes": plan.peak_bytes,
                "solver": getattr(plan, "solver", row.schedule),
            }
        except InfeasibleError:
            outcome = {"solver": "infeasible"}
    total, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Measured(
        *(seconds[name] or None for name in STAGES),
        total=total,
        cpu=cpu,
        rss_bytes=peak_rss(),
        nodes=len(results["trace"].draft.graph.nodes),
        cpu_of_planning=cpu - sum(cpu_seconds.values()),
        **outcome,
    )


def _plan(row: Row, model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    limits: dict[str, Any] = {
        "memory": autopar.Memory(row.memory, conventions="tensors"),
        "search": autopar.Search(row.time_limit),
        "microbatches": row.microbatches,
    }
    if row.is_searched:
        found = {"devices": row.mesh[0], "hardware": row.hardware, "pipeline": row.pipeline}
        return plan_offline(model, "auto", inputs, **found, **limits)
    names = IN_STAGES if row.schedule else AXES[len(row.mesh)]
    mesh = Mesh(dict(zip(names, row.mesh, strict=True)), hardware=row.hardware)
    pipeline = None if row.schedule is None else autopar.Pipeline(schedule=row.schedule)
    return plan_offline(model, mesh, inputs, pipeline=pipeline, **limits)


def example(row: Row) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of a row and its inputs, on the meta device."""
    if row.model in NAMES:
        return wide_model(row.model, row.batch, row.sequence, row.layers)
    return built_in(row.model, row.batch, row.sequence, row.layers)


@contextmanager
def timed(
    owners: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    """The seconds that calls of each name (function → its module or class) take in all, and what the last gave."""
    seconds, results = dict.fromkeys(owners, 0.0), {}

    def timer(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                results[name] = call(*args, **kwargs)
            finally:
                seconds[name] += clock() - start
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
