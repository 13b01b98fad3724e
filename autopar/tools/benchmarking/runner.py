"""Program of each rank in a benchmark: the contestants of one cell run alone first, then in turns, step by step.

On a calibrated machine, the compute rates are measured again first, on the ranks that then train. On a shared machine,
one program may take a quarter longer some minutes later.

A contestant's first steps run alone; they give its losses, its traffic and its peak memory. Then all contestants take
turns, in a new order each round, so that other load and the preceding contestant affect all alike. A step begins on all
ranks together, takes as long as its slowest rank, and no longer changes the weights. Strategies that make the same
program of a model run it once: the difference of two measurements of one program says nothing about the strategies.
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.costs.hardware.load import parse
from autopar.costs.plans.plan import Plan
from autopar.errors import AutoparError, InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.named import of_user, trainable
from autopar.runtime.collectives.mesh_axes import Traffic, record_traffic
from autopar.tools.benchmarking.baselines import FLAT, flattened
from autopar.tools.benchmarking.measurement import Costs, Measurement, largest_difference
from autopar.tools.benchmarking.meters import CollectiveCounter, cuda_peak_bytes, peak_bytes
from autopar.tools.benchmarking.trainers import AUTO, Terms, Trainer, contestant
from autopar.tools.calibration.calibrate import measured_anew
from autopar.tools.calibration.timing import BRIEF

Subject = tuple[nn.Module, tuple[Tensor, ...]]
LOSSES = 3  # steps whose losses are compared: one to begin, one that counts, one that is watched for its memory
WATCHED = 3  # steps whose memory is watched
WARM_UP = 2  # rounds in turns before those that count


@dataclass(frozen=True, slots=True)
class Cell:
    """A model on a mesh, and how it is measured there."""

    model: str
    mesh: Mesh
    strategies: tuple[str, ...]
    terms: Terms
    steps: int = 20
    batch: int = 8
    sequence: int = 64
    layers: int | None = None
    device: str = "cpu"
    seed: int = 0
    fake: bool = False

    def subject(self) -> Subject:
        """Return the model and the global batch, equal on every rank."""
        return trainable(self.model, self.batch, self.sequence, self.layers, self.device, self.seed)

    def measurement(self, strategy: str, **found: Any) -> Measurement:
        """Build the measurement of a strategy in this cell from what was found."""
        return Measurement(self.model, str(self.mesh), strategy, **found)


@dataclass(slots=True)
class _Entry:
    """A contestant that trains, and what its first steps have shown."""

    name: str
    contestant: Trainer
    losses: list[float]
    traffic: Traffic
    peak_bytes: int


def race(cell: Cell) -> list[Measurement]:
    """Measure all strategies of the cell on the ranks that call this together; equal on all of them."""
    mesh = init_device_mesh(cell.device, cell.mesh.sizes, mesh_dim_names=cell.mesh.names)
    if cell.terms.profile is not None:
        now = parse(measured_anew(dict(cell.terms.profile), cell.device, BRIEF))
        cell = replace(cell, terms=replace(cell.terms, hardware=now))
    subject = cell.subject()
    expected = _losses_alone(cell, subject)
    entries: list[_Entry] = []
    found: dict[str, Measurement] = {}
    for name in cell.strategies:
        entry, reason = _after_first_steps(cell, name, mesh, subject)
        if entry is None:
            found[name] = cell.measurement(name, reason=reason)
        else:
            entries.append(entry)
    runs_as = _same_programs(entries)
    runners = [entry for entry in entries if entry.name not in runs_as]
    seconds = dict(zip([runner.name for runner in runners], _in_turns(cell, runners), strict=True))
    for entry in entries:
        same_as = runs_as.get(entry.name, "")
        found[entry.name] = _measured(cell, entry, seconds[same_as or entry.name], expected, same_as)
    return [found[name] for name in cell.strategies]


def _losses_alone(cell: Cell, subject: Subject) -> list[float] | None:
    """Return the first losses of one process with the whole batch, found by rank 0; None for a fake world."""
    if cell.fake:
        return None
    losses: list[list[float] | None] = [None]
    if dist.get_rank() == 0:
        alone = Trainer(*copy.deepcopy(subject))
        try:
            losses = [[float(alone.step()) for _ in range(LOSSES)]]
        except Exception as error:
            raise InputError(f"{cell.model} fails on one process, without autopar:\n{of_user(error)}") from error
    dist.broadcast_object_list(losses, device=torch.device(cell.device))
    return losses[0]


def _after_first_steps(cell: Cell, name: str, mesh: DeviceMesh, subject: Subject) -> tuple[_Entry | None, str]:
    """Return the contestant after its first steps; or None, on all ranks, and the reason why it does not train."""
    allocated = torch.cuda.memory_allocated() if cell.device == "cuda" else 0
    built, reason = _tried(cell, lambda: contestant(name, *copy.deepcopy(subject), mesh, cell.terms))
    if built is None:
        return None, reason
    entry, reason = _tried(cell, lambda: _first_steps(name, built, mesh, allocated))
    return entry, reason


def _tried(cell: Cell, work: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of `work`; if any rank fails, return None and the first such rank's reason on all ranks."""
    result, reason = None, ""
    try:
        result = work()
    except AutoparError as error:
        reason = str(error)
    except Exception as error:  # a strategy that fails must not end the others
        reason = f"failed: {type(error).__name__}: {error}"
    reasons = [specified for specified in _of_every_rank(reason, cell) if specified]
    return (None, reasons[0]) if reasons else (result, "")


def _of_every_rank(value: Any, cell: Cell) -> list[Any]:
    if cell.fake:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _first_steps(name: str, built: Trainer, mesh: DeviceMesh, allocated: int) -> _Entry:
    """Begin, count, and watch the memory: LOSSES steps."""
    losses = [_number(built.step())]
    if built.plan is not None:
        with record_traffic() as traffic:
            losses.append(_number(built.step()))
    else:
        with CollectiveCounter(_axes_by_group(mesh)) as counter:
            losses.append(_number(built.step()))
        traffic = counter.traffic

    def step() -> None:
        losses.append(_number(built.step()))

    dist.barrier()  # gloo's threads let go of what they moved last when they have something else to do
    if mesh.device_type == "cuda":
        built.clear()
        peak = cuda_peak_bytes(step, allocated)
    else:
        # A thread of gloo may hold what it moved for longer than the step needs it: the least of some is the step's.
        peak = min(peak_bytes(step, built.clear, built.held) for _ in range(WATCHED))
    built.stop_learning()
    return _Entry(name, built, losses, traffic, peak)


def _number(loss: Tensor) -> float:
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def _axes_by_group(mesh: DeviceMesh) -> dict[str, str]:
    """Return the names of process groups → the axes of the mesh that they are, or all of them."""
    names = mesh.mesh_dim_names or ()
    axes = {str(mesh.get_group(name).group_name): name for name in names}
    if mesh.ndim > 1:
        axes[flattened(mesh).get_group().group_name] = FLAT
    return axes


def _same_programs(entries: list[_Entry]) -> dict[str, str]:
    """Map strategies to others with the same program, which run for both; presets are preferred to plans."""
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for entry in sorted(entries, key=lambda entry: entry.name == AUTO):
        program = entry.contestant.program
        if program is not None and first.setdefault(program, entry.name) != entry.name:
            found[entry.name] = first[program]
    return found


def _in_turns(cell: Cell, entries: list[_Entry]) -> list[list[float]]:
    """Return the seconds of each step of each contestant, of the rank that took longest."""
    gc.collect()
    gc.freeze()  # the collector need not walk through all models in the midst of a step
    wait = torch.cuda.synchronize if cell.device == "cuda" else lambda: None
    seconds: list[list[float]] = [[] for _ in entries]
    for turn in range(WARM_UP + cell.steps):
        order = list(range(len(entries)))
        random.Random(turn).shuffle(order)  # equal on all ranks
        for number in order:
            dist.barrier()
            wait()
            start = time.perf_counter()
            entries[number].contestant.step()
            wait()
            if turn >= WARM_UP:
                seconds[number].append(time.perf_counter() - start)
    of_all = _of_every_rank(seconds, cell)
    return [[max(step) for step in zip(*ranks, strict=True)] for ranks in zip(*of_all, strict=True)]


def _measured(
    cell: Cell, entry: _Entry, seconds: list[float], expected: list[float] | None, same_as: str
) -> Measurement:
    of_all = _of_every_rank((entry.losses, entry.peak_bytes), cell)
    losses = [statistics.fmean(each) for each in zip(*(losses[:LOSSES] for losses, _ in of_all), strict=True)]
    peak = max(peak for _, peak in of_all)
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else 3 * seconds
    built = entry.contestant
    return cell.measurement(
        entry.name,
        measured=Costs(median, peak, _by_name(entry.traffic.num_bytes)),
        predicted=None if built.plan is None else _prediction(built.plan),
        timeline_seconds=None if built.plan is None or built.plan.context is None else built.plan.timeline().seconds,
        calls=_by_name(entry.traffic.calls),
        quartiles=(low, high),
        num_steps=len(seconds),
        setup_seconds=max(_of_every_rank(built.setup_seconds, cell)),
        same_as=same_as,
        apart=None if expected is None else largest_difference(losses, expected),
    )


def _prediction(plan: Plan) -> Costs:
    return Costs(plan.seconds, plan.peak_bytes, _by_name(plan.traffic))


def _by_name(counts: Any) -> dict[str, int]:
    """Map (collective, axis) to a count, without zeros, by the names of JSON."""
    return {f"{collective}/{axis}": count for (collective, axis), count in sorted(counts.items()) if count}
