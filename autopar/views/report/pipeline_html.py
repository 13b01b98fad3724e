"""Predicted step of a pipeline as a trace and as a page with a Gantt chart.

A track (a lane) per rank; a slice per computation, named by its kind and micro-batch ("F3"):

    F       forward                   I    gradient of the input
    B       whole backward            W    gradient of the weights
    once    work of a stage once per step

Colours tell kinds apart, lighter ones the later stages of a rank. An empty part of a track is idle time, the bubble.
The trace has the Trace Event Format, as in `trace`, with times in microseconds.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from autopar.console.units import format_bytes, format_seconds
from autopar.planning.pipeline.plan import PipelinePlan, StagePlan
from autopar.planning.pipeline.schedules.simulation import Slice
from autopar.views.report.comparison_chart import comparison_section
from autopar.views.report.html import TEMPLATE as PLAN_TEMPLATE
from autopar.views.report.html import fact_items, kept_whole_html, memory_section, time_section
from autopar.views.report.html_parts import html_table
from autopar.views.report.pipeline_table import HEADERS, facts, stage_rows
from autopar.views.report.pipeline_trace import KINDS, slice_label

TEMPLATE = Path(__file__).with_name("pipeline.html")
WIDTH, LANE, GAP, LEFT, BOTTOM = 1000, 26, 6, 60, 22  # chart geometry, in SVG units
NUM_TICKS = 6
LETTER_WIDTH = 6.0  # per character of a slice's label, in SVG units
LIGHTEST = 0.5  # opacity of the last stage of a rank


def page(plan: PipelinePlan) -> str:
    """Return the whole page as HTML text."""
    style = re.search(r"<style>.*?</style>", PLAN_TEMPLATE.read_text(encoding="utf-8"), re.DOTALL)
    assert style is not None, f"no style in {PLAN_TEMPLATE.name}"
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    notes = (f"<ul>{notes}</ul>" if notes else "") + kept_whole_html(plan.kept_whole)
    parts = {
        "title": f"Pipeline plan for {escape(str(plan.mesh))}",
        "style": style.group(),
        "header": fact_items(facts(plan)),
        "words": escape(_words(plan)),
        "legend": _legend(plan),
        "gantt": gantt(plan),
        "stages": html_table(HEADERS, _stage_cells(plan), numbers=_numbers()),
        "comparison": comparison_section(plan.comparison),
        "details": "".join(map(_stage_details, plan.stages)),
        "notes": f'<section id="notes"><h2>Notes</h2>{notes}</section>' if notes else "",
    }
    # One pass, so that nothing of the plan is taken for a placeholder.
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)


def gantt(plan: PipelinePlan) -> str:
    """Return the chart as SVG: a lane per rank, a rectangle per slice, times below."""
    ranks = range(plan.schedule.num_ranks)
    bottom = len(ranks) * (LANE + GAP)
    scale = (WIDTH - LEFT) / plan.seconds if plan.seconds else 0.0
    shapes = [_tick(plan, number, bottom) for number in range(NUM_TICKS)]
    for rank in ranks:
        y = rank * (LANE + GAP)
        title = f"<title>rank {rank} waits for {plan.idle(rank):.1%} of the step</title>"
        shapes.append(f'<text x="4" y="{y + LANE / 2 + 4:.1f}">rank {rank}</text>')
        shapes.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT}" height="{LANE}">{title}</rect>')
    shapes += [_rectangle(plan, each, scale) for each in plan.timeline.slices if each.end > each.start]
    box = f'viewBox="0 0 {WIDTH} {bottom + BOTTOM}"'
    return f'<svg class="gantt" {box} role="img" aria-label="{escape(_words(plan))}">{"".join(shapes)}</svg>'


def _tick(plan: PipelinePlan, number: int, bottom: int) -> str:
    share = number / (NUM_TICKS - 1)
    x, last = LEFT + share * (WIDTH - LEFT), number == NUM_TICKS - 1
    anchor = "end" if last else "middle"
    text = f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}">'
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>'
    return f"{line}{text}{format_seconds(share * plan.seconds)}</text>"


def _rectangle(plan: PipelinePlan, each: Slice, scale: float) -> str:
    """Return a rectangle with its label, where that fits, and what it is as a tooltip."""
    stages = plan.schedule.stages_of(each.rank)
    place = stages.index(each.stage)
    opacity = 1 - (1 - LIGHTEST) * place / max(len(stages) - 1, 1)
    x, width = LEFT + each.start * scale, (each.end - each.start) * scale
    y, label = each.rank * (LANE + GAP), slice_label(each)
    of = "" if each.microbatch is None else f" of micro-batch {each.microbatch}"
    title = (
        f"{label}: {KINDS[each.kind]}{of} on stage {each.stage} ({plan.stages[each.stage].range}), rank {each.rank}, "
        f"{format_seconds(each.start)} to {format_seconds(each.end)}"
    )
    text = ""
    if width >= LETTER_WIDTH * len(label):
        text = f'<text x="{x + width / 2:.1f}" y="{y + LANE / 2 + 3:.1f}">{label}</text>'
    light = " light" if place else ""
    shape = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE}" fill-opacity="{opacity:.2f}"/>'
    return f'<g class="slice {each.kind}{light}"><title>{escape(title)}</title>{shape}{text}</g>'


def _words(plan: PipelinePlan) -> str:
    return (
        f"{plan.microbatches} micro-batches in {format_seconds(plan.seconds)}, over {plan.schedule.num_ranks} ranks; "
        f"the ranks wait for {plan.bubble:.1%} of it, the bubble"
    )


def _legend(plan: PipelinePlan) -> str:
    """Return a key per kind that occurs."""
    there = {each.kind for each in plan.timeline.slices}
    found = []
    for kind, name in KINDS.items():
        if kind in there:
            key = '<svg class="key" viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10"/></svg>'
            found.append(f'<span class="{kind}">{key}{kind}: {name}</span>')
    lighter = "<span>lighter: later stages of a rank</span>" if plan.schedule.chunks > 1 else ""
    return "".join(found) + lighter


def _stage_cells(plan: PipelinePlan) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in stage_rows(plan)]


def _numbers() -> list[int]:
    return [column for column, name in enumerate(HEADERS) if name != "blocks"]


def _stage_details(stage: StagePlan) -> str:
    """Return the memory and time of a stage's own plan, folded."""
    peak = format_bytes(stage.plan.peak_bytes)
    title = f"Stage {stage.number}: {escape(stage.range)}, {peak} per device"
    inside = (
        f"<h3>Memory of a device</h3>{memory_section(stage.plan)}"
        f"<h3>Time of one micro-batch, and of what a step does once</h3>"
        f'<div class="columns">{time_section(stage.plan)}</div>'
    )
    return f"<section><details><summary>{title}</summary>{inside}</details></section>"
