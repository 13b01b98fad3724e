"""A training step of one rank by autopar, compared with one written by hand, collectives stubbed on both sides.

Both train equal weights on equal texts, so that their losses must agree: what the stubs leave out, both leave out. They
take turns, step by step; medians count. Memory is what a contestant allocates beyond what is there without it, at the
highest moment of an eager step.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.plan import Plan
from autopar.tools.benchmarking.meters import cuda_peak_bytes, peak_bytes
from autopar.tools.benchmarking.trainers import Trainer
from benchmarks.gpu.llama_by_hand import LlamaByHand
from benchmarks.gpu.setting import Finding, Row, Setting, stubbed

WARM_UP = 3  # steps; the first ones plan, compile, and fill the optimizer's state
EAGER_GOAL, COMPILED_GOAL, MEMORY_GOAL = 0.97, 1.0, 0.1
APART = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest allowed relative difference of losses, by dtype."""


def compared(setting: Setting, axes: Mapping[str, int], compiled: bool) -> Finding:
    """The step on a mesh of these axes ("tp", and perhaps "dp" before it)."""
    with stubbed(setting.device, axes) as mesh:
        by_hand, hand_bytes = _trained(setting, lambda: _by_hand(setting, mesh, compiled))
        ours, our_bytes = _trained(setting, lambda: _by_autopar(setting, mesh, compiled))
        losses = [float(each.step()) for each in (ours, by_hand)]
        seconds = _in_turns(setting, (ours, by_hand))
    assert ours.plan is not None
    return found(setting, ours.plan, (seconds[0], seconds[1]), (our_bytes, hand_bytes), losses, compiled)


def found(
    setting: Setting,
    plan: Plan,
    seconds: tuple[float, float],
    num_bytes: tuple[int, int],
    losses: list[float],
    compiled: bool,
) -> Finding:
    """The rows of what was measured, of autopar's and of that by hand."""
    ratio, goal = seconds[1] / seconds[0], COMPILED_GOAL if compiled else EAGER_GOAL
    collectives = sum(moved.seconds for row in plan.rows for moved in row.transfers)
    computing = plan.device_seconds - collectives
    of_plan = num_bytes[0] / plan.peak_bytes
    apart = abs(losses[0] - losses[1]) / abs(losses[1])
    rows = [
        Row(
            "speed beside by hand",
            f"{ratio:.3f} ({format_seconds(seconds[0])}, by hand {format_seconds(seconds[1])})",
            f"≥ {goal}",
            setting.judged(ratio >= goal),
        ),
        Row(
            "step beside the plan's computing",
            f"{seconds[0] / computing:.2f} of {format_seconds(computing)}",
        ),
        Row("losses apart", f"{apart:.1e}", f"≤ {APART[setting.dtype]:.0e}", apart <= APART[setting.dtype]),
    ]
    if not compiled:  # which holds less than the plan of an eager step says
        rows.append(
            Row(
                "memory beside the plan's",
                f"{of_plan:.3f} of {format_bytes(plan.peak_bytes)}; by hand {format_bytes(num_bytes[1])}",
                f"1 ± {MEMORY_GOAL}",
                abs(of_plan - 1) <= MEMORY_GOAL,
            )
        )
    data = {"seconds": seconds, "num_bytes": num_bytes, "losses": losses, "predicted_bytes": plan.peak_bytes}
    return Finding(tuple(rows), {**data, "predicted_seconds": plan.seconds, "predicted_seconds_alone": computing})


def _trained(setting: Setting, build: Callable[[], Trainer]) -> tuple[Trainer, int]:
    """A contestant after its first steps, and its bytes at the highest moment of one."""
    gc.collect()
    before = torch.cuda.memory_allocated() if setting.device == "cuda" else 0
    contestant = build()
    contestant.stop_learning()  # every step computes the same
    for _ in range(WARM_UP):
        contestant.step()
    contestant.clear()
    gc.collect()
    if setting.device == "cuda":
        peak = cuda_peak_bytes(contestant.step, before)
    else:
        peak = peak_bytes(contestant.step, contestant.clear, contestant.held)
    contestant.clear()
    return contestant, peak


def _by_hand(setting: Setting, mesh: DeviceMesh, compiled: bool) -> Trainer:
    layers, dp = setting.num_layers(compiled), mesh.get_group("dp") if mesh.ndim > 1 else None
    with torch.device(setting.device):
        model = LlamaByHand(setting.config(layers), mesh.get_group("tp"), dp).to(setting.dtype)
    model.load_parts(setting.whole_model(layers).state_dict())
    if dp is not None:
        model.reduce_gradients()
    if compiled:
        model.compile()
    ids, labels = setting.batch(_num_texts(mesh))
    return Trainer(model, (ids[:1], labels[:1]))  # of rank 0


def _by_autopar(setting: Setting, mesh: DeviceMesh, compiled: bool) -> Trainer:
    inputs = setting.batch(_num_texts(mesh))
    model: Any = autopar.compile(
        setting.whole_model(setting.num_layers(compiled)),
        mesh,
        inputs,
        strategy="megatron",
        hardware=setting.profile,
        memory=autopar.Memory(recompute="none"),
    )
    if compiled:
        model.compile()
    return Trainer(model, inputs, plan=model.plan)


def _num_texts(mesh: DeviceMesh) -> int:
    """Return the number of texts in the global batch: one per data-parallel rank."""
    return mesh.size() // mesh["tp"].size()


def _in_turns(setting: Setting, contestants: tuple[Trainer, ...]) -> list[float]:
    """Median seconds of a step of each."""
    seconds: list[list[float]] = [[] for _ in contestants]
    for turn in range(setting.steps):
        order = range(len(contestants)) if turn % 2 else reversed(range(len(contestants)))
        for number in order:
            setting.synchronize()
            start = time.perf_counter()
            contestants[number].step()
            setting.synchronize()
            seconds[number].append(time.perf_counter() - start)
            contestants[number].clear()
    return [statistics.median(each) for each in seconds]
