"""Charts of plans: memory over a step, the simulated timeline of a step, and the schedule of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.patches import Patch

import autopar
from autopar.costs.plans.decision_rows import Instant, MemoryUse
from autopar.costs.plans.plan import Plan
from autopar.costs.timeline.values import COMPUTE, Event
from autopar.models import built_in
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.views.report.pipeline_trace import KINDS, slice_label
from benchmarks.pictures.style import COLOURS, INK, WHOLE, save

GIGABYTE, MILLISECOND = 1e9, 1e-3
MEMORY_LIMIT = 20 * 10**9
SEARCH = autopar.Search(time_limit=600)
LONGEST_GAP = 1e-4
"""Seconds between two calls that are drawn as one bar."""
MAX_POINTS = 400
"""Points of a curve; of the moments in between the highest is drawn."""
PHASES = {"forward": COLOURS[0], "backward": COLOURS[1], "recomputation": COLOURS[6], "optimizer": WHOLE}
COLLECTIVES = {
    "all_gather": COLOURS[2],
    "reduce_scatter": COLOURS[3],
    "all_reduce": COLOURS[4],
    "all_to_all": COLOURS[5],
}
SLICES = {"F": COLOURS[0], "I": COLOURS[1], "B": COLOURS[1], "W": COLOURS[3], "once": WHOLE}


def memory_over_a_step(path: Path) -> None:
    """Draw the live bytes of a device over the calls of a step, without a limit and within one."""
    model, inputs = built_in("llama-8b", batch=64, sequence=4096)
    mesh = autopar.Mesh({"dp": 8, "tp": 8}, hardware="h100")
    plans = [
        autopar.plan(model, mesh, inputs, memory=limit, precision="bf16-mixed", search=SEARCH)
        for limit in (None, MEMORY_LIMIT)
    ]
    labels = ("no limit", f"limit of {MEMORY_LIMIT / GIGABYTE:.0f} GB")
    figure, axes = pyplot.subplots(figsize=(8.4, 3.4))
    for plan, label, colour in zip(plans, labels, COLOURS, strict=False):
        heights = curve(_memory(plan).timeline)
        places = [each / len(heights) for each in range(len(heights))]
        axes.fill_between(places, heights, step="post", color=colour, alpha=0.35, linewidth=0)
        label = f"{label}: {plan.step_seconds / MILLISECOND:.0f} ms a step"
        axes.step(places, heights, where="post", color=colour, linewidth=1.2, label=label)
    free = _memory(plans[0])
    turn = [each.backward for each in free.timeline].index(True) / len(free.timeline)
    constant = sum(free.parts.get(name, 0) for name in ("parameters", "optimizer")) / GIGABYTE
    axes.axvline(turn, color=INK, linewidth=0.8)
    axes.axhline(constant, color=INK, linewidth=0.8, linestyle=":")
    axes.text(0.3, constant, "parameters and optimizer state", ha="center", va="bottom", fontsize=8)
    axes.axhline(MEMORY_LIMIT / GIGABYTE, color=COLOURS[1], linewidth=0.8, linestyle="--")
    top = axes.get_ylim()[1]
    axes.text(turn / 2, top, "forward", ha="center", va="top")
    axes.text((1 + turn) / 2, top, "backward", ha="center", va="top")
    axes.set(xlim=(0, 1), ylim=(0, top), xticks=[], xlabel="calls of a step", ylabel="GB of tensors on a device")
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.72))
    _plain(axes)
    save(figure, path, "Memory of a device over a step of Llama-3-8B, with and without a limit")
    pyplot.close(figure)


def _memory(plan: Plan) -> MemoryUse:
    assert plan.memory is not None, "a plan that was just made knows its memory"
    return plan.memory


def curve(timeline: Sequence[Instant]) -> list[float]:
    """Return at most `MAX_POINTS` heights in GB, each the highest of its moments."""
    stride = -(-len(timeline) // MAX_POINTS)
    groups = [timeline[start : start + stride] for start in range(0, len(timeline), stride)]
    return [max(each.num_bytes for each in group) / GIGABYTE for group in groups]


def timeline(path: Path) -> None:
    """Draw the streams of a device over a simulated step of ZeRO-3 on two nodes."""
    model, inputs = built_in("llama-8b", batch=16, sequence=4096, num_layers=4)
    mesh = autopar.Mesh({"dp": 16}, hardware="h100")
    plan = autopar.plan(model, mesh, inputs, strategy="zero3", precision="bf16-mixed")
    assert isinstance(plan, Plan)
    modules = {row.name: row.module for row in plan.rows}
    found = plan.timeline()
    figure, axes = pyplot.subplots(figsize=(10.5, 2.4))
    streams = found.streams
    for event in found.events:
        if event.task.stream != COMPUTE and event.end > event.start:
            _bar(axes, event, streams.index(event.task.stream), COLLECTIVES[event.task.name])
    for phase, label, start, end in merged([each for each in found.events if each.task.stream == COMPUTE], modules):
        width = (end - start) / MILLISECOND
        axes.barh(
            0, width, left=start / MILLISECOND, height=0.75, color=PHASES[phase], edgecolor="white", linewidth=0.5
        )
        if width > 0.03 * found.seconds / MILLISECOND:
            axes.text((start + end) / 2 / MILLISECOND, 0, label, ha="center", va="center", color="white", fontsize=6.5)
    names = {COMPUTE: "computing"}
    axes.set_yticks(range(len(streams)), [names.get(each, f"collectives\n{each}") for each in streams])
    axes.set(xlim=(0, found.seconds / MILLISECOND), xlabel="ms")
    axes.invert_yaxis()
    used = {each.task.name for each in found.events} | {each.task.phase for each in found.events}
    keys = [Patch(color=c, label=n.replace("_", "-")) for n, c in {**PHASES, **COLLECTIVES}.items() if n in used]
    axes.legend(handles=keys, ncols=len(keys), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    _plain(axes)
    save(figure, path, "Simulated step of four layers of Llama-3-8B under ZeRO-3 on two nodes of 8 GPUs")
    pyplot.close(figure)


def merged(events: Sequence[Event], modules: dict[str, str]) -> list[tuple[str, str, float, float]]:
    """Return (phase, layer, start, end) of the computing events, those of one layer in a row together."""
    found: list[tuple[str, str, float, float]] = []
    for event in events:
        if event.end <= event.start:
            continue
        number = re.search(r"layers\.(\d+)", modules.get(event.task.row, ""))
        label = f"layer {number[1]}" if number else "head"
        label = "" if event.task.phase == "optimizer" else label
        if found and found[-1][:2] == (event.task.phase, label) and event.start - found[-1][3] < LONGEST_GAP:
            found[-1] = (*found[-1][:3], event.end)
        else:
            found.append((event.task.phase, label, event.start, event.end))
    return found


def pipeline(path: Path) -> None:
    """Draw what each rank of a pipeline does over a simulated step of ZBV."""
    model, inputs = built_in("llama-1b", batch=32, sequence=2048)
    mesh = autopar.Mesh({"pp": 4}, hardware="h100")
    setting = autopar.Pipeline(axis="pp", schedule="zbv")
    plan = autopar.plan(model, mesh, inputs, pipeline=setting, microbatches=8, precision="bf16-mixed")
    assert isinstance(plan, PipelinePlan)
    figure, axes = pyplot.subplots(figsize=(10.5, 2.4))
    seconds = plan.timeline.seconds
    for each in plan.timeline.slices:
        if each.end <= each.start:
            continue
        later = plan.schedule.stages_of(each.rank).index(each.stage) > 0
        width = (each.end - each.start) / MILLISECOND
        style = {"height": 0.8, "color": SLICES[each.kind], "alpha": 0.72 if later else 1.0, "edgecolor": "white"}
        axes.barh(each.rank, width, left=each.start / MILLISECOND, linewidth=0.5, **style)
        label = slice_label(each)
        if width > 0.0075 * len(label) * seconds / MILLISECOND:
            middle = (each.start + each.end) / 2 / MILLISECOND
            axes.text(middle, each.rank, label, ha="center", va="center", color="white", fontsize=6)
    ranks = range(plan.schedule.num_ranks)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set(xlim=(0, seconds / MILLISECOND), xlabel=f"ms, bubble {plan.bubble:.1%}; muted: the later stage of a rank")
    axes.invert_yaxis()
    used = {each.kind for each in plan.timeline.slices}
    keys = [Patch(color=SLICES[kind], label=f"{kind}: {name}") for kind, name in KINDS.items() if kind in used]
    axes.legend(handles=keys, ncols=len(keys), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    _plain(axes)
    save(figure, path, "Simulated step of a pipeline of four ranks by the schedule zbv")
    pyplot.close(figure)


def _bar(axes: Any, event: Event, lane: int, colour: str) -> None:
    width = (event.end - event.start) / MILLISECOND
    axes.barh(lane, width, left=event.start / MILLISECOND, height=0.75, color=colour, linewidth=0)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
