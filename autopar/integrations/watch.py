"""Watch a run: seconds, tokens per second, MFU and memory of every step, compared with the plan's predictions.

MFU = FLOPs that the model asks for / (seconds × devices × peak FLOP/s)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.costs.hardware.load import load
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.model_flops import batch_of, model_flops
from autopar.errors import InputError, PlanError
from autopar.runtime.module.compiled_module import ParallelModule


@dataclass(frozen=True, slots=True)
class Record:
    """Measurements and prediction of one step; None is unknown."""

    step: int
    seconds: float
    predicted_seconds: float | None
    samples_per_second: float
    tokens_per_second: float | None
    """Tokens per second, counted in the first integer input of two dims or more; None without such an input."""
    flops: float
    """Model FLOPs of the step on all devices together, without recomputation."""
    mfu: float
    peak_bytes: int | None
    """The most that tensors have taken on this device in the step; None on a CPU, which keeps no account."""
    predicted_bytes: int
    values: Mapping[str, float] = field(default_factory=dict)
    """Values that `step` was given."""


class Watch:
    """Measures the time between calls of `step`, and writes a record of each to a JSON-lines file, or TensorBoard.

    The first call starts the clock. The first rank of the mesh writes; all ranks may call.

    >>> watch = Watch(model, "run.jsonl")  # doctest: +SKIP
    >>> for batch in batches:  # doctest: +SKIP
    ...     train(batch)
    ...     watch.step(loss=loss)
    """

    def __init__(
        self,
        model: ParallelModule,
        path: str | Path | None = None,
        *,
        tensorboard: str | Path | None = None,
        calls: int = 1,
        peak_flops: float | None = None,
    ) -> None:
        """`calls` of the model, or of its `train_step`, make a step (gradient accumulation).

        `peak_flops` is the peak of one device in FLOP/s; by default that of the plan's hardware profile for the dtype
        of each product. Raises InputError for a pipeline, and if TensorBoard is requested and not installed.
        """
        if not isinstance(model, ParallelModule):
            raise InputError(
                f"model is a {type(model).__name__}; give what autopar.compile returns on a mesh without a pipeline."
            )
        if calls < 1:
            raise InputError(f"calls={calls}; give how many calls of the model make a step, 1 or more.")
        self._model, self._calls, self._peak = model, calls, peak_flops
        self._steps, self._since = 0, 0.0
        self._writes = int(model.mesh.mesh.flatten()[0]) == dist.get_rank()
        self._path = None if path is None else Path(path)
        self._board = None if tensorboard is None else _writer(tensorboard, self._writes)

    def step(self, **values: float | torch.Tensor) -> Record | None:
        """Say that a step is done; what it took since the last one, None for the first. `values` are written, too."""
        self._steps += 1
        now, before = time.perf_counter(), self._since
        self._since = now
        peak_bytes = _peak_bytes(self._model.mesh.device_type)
        if self._steps == 1:
            return None
        given = {name: float(value) for name, value in values.items()}
        record = self._record(now - before, peak_bytes, given)
        if self._writes:
            self._write(record)
        return record

    def _record(self, seconds: float, peak_bytes: int | None, values: Mapping[str, float]) -> Record:
        plan, program = self._model.plan, self._model.program
        runs = self._model.num_microbatches * self._calls
        flops = model_flops(program)
        samples, tokens = batch_of(program)
        ideal = sum(count / (self._peak or _peak_of(plan, dtype)) for dtype, count in flops.items())
        return Record(
            step=self._steps,
            seconds=seconds,
            predicted_seconds=_predicted(plan, self._model.num_microbatches, self._calls),
            samples_per_second=samples * runs / seconds,
            tokens_per_second=None if tokens is None else tokens * runs / seconds,
            flops=sum(flops.values()) * runs,
            mfu=ideal * runs / (seconds * plan.mesh.num_devices),
            peak_bytes=peak_bytes,
            predicted_bytes=plan.peak_bytes,
            values=values,
        )

    def _write(self, record: Record) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")
        if self._board is not None:
            numbers = {**asdict(record), **record.values}
            for name, value in numbers.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(f"autopar/{name}", value, record.step)
            self._board.flush()


def _predicted(plan: Plan, num_microbatches: int, calls: int) -> float | None:
    """Return the seconds of a step of so many micro-batches and calls; None if the plan was made for another number."""
    if num_microbatches == 1:
        return plan.step_seconds * calls
    workload = plan.workload
    return workload.seconds * calls if workload is not None and workload.microbatches == num_microbatches else None


def _peak_of(plan: Plan, dtype: torch.dtype) -> float:
    try:
        return load(plan.mesh.hardware).flops_of(dtype)
    except PlanError:
        raise InputError(
            f"the plan's hardware {plan.mesh.hardware!r} is no profile that can be read here; give the peak of one "
            "device in FLOP/s, as in peak_flops=989e12."
        ) from None


def _peak_bytes(device_type: str) -> int | None:
    if device_type != "cuda":
        return None
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def _writer(folder: str | Path, writes: bool) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "tensorboard= needs the package tensorboard, which is not installed; install it, or give a path for JSON."
        ) from None
    return SummaryWriter(str(folder)) if writes else None
