"""The plan of a pipeline as a table that a person reads: a line per stage, and how the schedule runs them."""

from __future__ import annotations

from autopar.console.tables import Fact, fact_lines, fitted_table, wrapped
from autopar.console.units import format_bytes, format_seconds, format_share
from autopar.planning.pipeline.plan import PipelinePlan, StagePlan
from autopar.views.report.comparison_table import comparison_text
from autopar.views.report.facts import OF_SECONDS, host_words, reserved_words, workload_facts
from autopar.views.report.table import kept_whole_text

HEADERS = ("stage", "rank", "blocks", "forward", "backward", "per step", "peak memory", "in flight", "idle")
LEGEND = (
    "forward, backward: of one micro-batch",
    "per step: what a stage does once in a step: optimizer, moves of weights and the reduction of their gradients",
    "in flight: micro-batches that wait for their backward",
    "idle: the share of the step in which the rank waits",
    "print(plan.stages[0].plan) shows how stage 0 is planned",
)


def pipeline_table(plan: PipelinePlan) -> str:
    """Return the plan as text: a header, the stages, notes, and how to see more of a stage."""
    mesh = plan.mesh
    title = f"pipeline plan for the mesh {mesh} ({mesh.num_devices} devices, hardware {mesh.hardware})"
    header = [wrapped(title), *fact_lines(facts(plan))]
    right = [number for number, name in enumerate(HEADERS) if name != "blocks"]
    table = fitted_table(stage_rows(plan), HEADERS, right)
    legend = [wrapped(line) for line in LEGEND]
    notes = [wrapped(f"note: {note}") for note in plan.notes]
    whole = [text] if (text := kept_whole_text(plan.kept_whole)) else []
    compared = [[part] for part in comparison_text(plan.comparison)] if plan.comparison else []
    return "\n\n".join("\n".join(part) for part in (header, [table], legend, whole, notes, *compared) if part)


def facts(plan: PipelinePlan) -> tuple[Fact, ...]:
    """Return the facts of the header: the schedule, the step and the memory."""
    schedule, ranks = plan.schedule, range(plan.schedule.num_ranks)
    limit = "no limit set" if plan.memory_limit is None else f"limit {format_bytes(plan.memory_limit)}"
    fullest = max(ranks, key=plan.rank_bytes)
    memory = f"{plan.reserved.both(plan.peak_bytes)} per device at the peak, on rank {fullest}, {limit}"
    gap = f", optimality gap {format_share(plan.gap)}" if plan.bound else ""
    chunks = f", {schedule.chunks} on each" if schedule.chunks > 1 else ""
    where = f"{schedule.num_stages} stages on {schedule.num_ranks} ranks of axis {plan.axis}{chunks}"
    facts = workload_facts(plan.workload, plan.mesh)
    return (
        *(fact for fact in facts if fact.name not in OF_SECONDS),
        Fact("schedule", f"{schedule.name}, m = {plan.microbatches} micro-batches, {where}"),
        Fact("step", f"{format_seconds(plan.seconds)} predicted, bubble {plan.bubble:.1%}{gap}"),
        *(fact for fact in facts if fact.name in OF_SECONDS),
        Fact("memory", "\n".join((memory, *reserved_words(plan.peak_bytes, plan.reserved)))),
        *([Fact("host", host_words(plan.host))] if plan.host_bytes else []),
    )


def stage_rows(plan: PipelinePlan) -> list[list[str]]:
    """Return a line of text per stage, in the columns of HEADERS."""
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
