"""The plan of a pipeline as a table that a person reads: a line per stage, and how the schedule runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from autopar.pipeline.plan import PipelinePlan, StagePlan
from autopar.report.table import host_words
from autopar.units import format_bytes, format_seconds, format_share

HEADERS = ("stage", "rank", "blocks", "forward", "backward", "once", "peak memory", "in flight", "idle")
"""Forward and backward are those of one micro-batch; idle is the share of the step in which the rank waits."""
BLOCKS_WIDTH = 48


@dataclass(frozen=True, slots=True)
class Fact:
    """Something said about a pipeline's plan, under a name."""

    name: str
    text: str


def pipeline_table(plan: PipelinePlan) -> str:
    """The plan as text: a header, the stages, notes, and how to see more of a stage."""
    width = max(len(fact.name) for fact in facts(plan)) + 2
    mesh = plan.mesh
    header = [f"pipeline plan for the mesh {mesh} ({mesh.num_devices} devices, hardware {mesh.hardware})"]
    header += [f"  {fact.name:<{width}}{fact.text}" for fact in facts(plan)]
    columns = [None if name != "blocks" else BLOCKS_WIDTH for name in HEADERS]
    table = tabulate(
        stage_rows(plan), headers=HEADERS, maxcolwidths=columns, colalign=_alignment(), disable_numparse=True
    )
    notes = [f"note: {note}" for note in plan.notes]
    more = "forward and backward of one micro-batch; print(plan.stages[0].plan) shows how stage 0 is planned"
    return "\n\n".join(["\n".join(header), table, *(["\n".join(notes)] if notes else []), more])


def facts(plan: PipelinePlan) -> tuple[Fact, ...]:
    """What the header says: the schedule, the step and the memory."""
    schedule, ranks = plan.schedule, range(plan.schedule.num_ranks)
    limit = "no limit set" if plan.memory_limit is None else f"limit {format_bytes(plan.memory_limit)}"
    fullest = max(ranks, key=plan.rank_bytes)
    gap = f", gap {format_share(plan.gap)}" if plan.bound else ""
    chunks = f", {schedule.chunks} on each" if schedule.chunks > 1 else ""
    where = f"{schedule.num_stages} stages on {schedule.num_ranks} ranks of axis {plan.axis}{chunks}"
    return (
        Fact("schedule", f"{schedule.name}, m = {plan.microbatches} micro-batches, {where}"),
        Fact("step", f"{format_seconds(plan.seconds)} predicted, bubble {plan.bubble:.1%}{gap}"),
        Fact("memory", f"{format_bytes(plan.peak_bytes)} per device at the peak, on rank {fullest}, {limit}"),
        *([Fact("host", host_words(plan.host))] if plan.host_bytes else []),
    )


def stage_rows(plan: PipelinePlan) -> list[list[str]]:
    """A line of text per stage, in the columns of HEADERS."""
    return [_row(plan, stage) for stage in plan.stages]


def _row(plan: PipelinePlan, stage: StagePlan) -> list[str]:
    rank, seconds = plan.schedule.rank_of(stage.number), stage.seconds
    return [
        str(stage.number),
        str(rank),
        stage.range if len(stage.blocks) == 1 else f"{stage.range} ({len(stage.blocks)})",
        format_seconds(seconds.forward),
        format_seconds(seconds.backward_input + seconds.backward_weight),
        format_seconds(seconds.once),
        format_bytes(stage.plan.peak_bytes),
        str(plan.schedule.in_flight(stage.number)),
        f"{plan.idle(rank):.1%}",
    ]


def _alignment() -> Sequence[str]:
    return ["left" if name == "blocks" else "right" for name in HEADERS]
