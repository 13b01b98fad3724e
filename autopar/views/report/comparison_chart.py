"""The candidates of `mesh="auto"` on a page: step and memory of each as a chart with their Pareto front, and a table.

A filled point is a plan, an open one an estimate, a square a plan that the user put there; the ringed one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape

from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.comparison import Comparison, Contender
from autopar.views.report.comparison_table import ABOUT, detail, first_line, schedule_words, summary, taken_of
from autopar.views.report.html_parts import html_table

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 1000, 360, 80, 28, 24
NUM_TICKS = 5
RADIUS = 5
SLOWEST = 2.0
"""Times the fastest step: slower candidates are in the table alone."""
NAMES = ("mesh", "step", "by estimate", "tensors", "microbatches", "schedule", "by", "")


def comparison_section(comparison: Comparison | None) -> str:
    """Return the section of a page; nothing for a plan on a mesh that was given."""
    if comparison is None:
        return ""
    known = [*comparison.planned, *comparison.estimated]
    rows = [_cells(each, comparison) for each in (*known, *comparison.excluded)]
    numbers = [
        column for column, name in enumerate(NAMES) if name in ("step", "by estimate", "tensors", "microbatches")
    ]
    recipes = [each for each in comparison.planned if each.is_compared or each is taken_of(comparison)]
    listed = "".join(f"<li>{_recipe(each, comparison)}</li>" for each in recipes)
    return (
        f'<section id="comparison"><h2>Candidates</h2><p>{escape(summary(comparison))}</p>{_chart(comparison)}'
        f"<ul>{listed}</ul><details><summary>all candidates</summary>{html_table(NAMES, rows, numbers)}</details>"
        "</section>"
    )


def _recipe(each: Contender, comparison: Comparison) -> str:
    mark = "taken" if each is taken_of(comparison) else "compared"
    step = f"{format_seconds(each.seconds or 0)}, {format_bytes(each.num_bytes or 0)} of tensors"
    return f"{mark}: <code>{escape(each.recipe)}</code>: {step}; {escape(detail(each))}"


def _chart(comparison: Comparison) -> str:
    """Draw steps over memory, with the front as a line."""
    known = [each for each in comparison.contenders if each.seconds is not None and each.num_bytes is not None]
    fastest = min((each.seconds or 0.0 for each in known), default=0.0)
    points = [each for each in known if (each.seconds or 0.0) <= SLOWEST * fastest or each.is_compared]
    if not points:
        return ""
    across = _scale([each.num_bytes or 0 for each in points], LEFT, WIDTH - MARGIN)
    up = _scale([each.seconds or 0.0 for each in points], HEIGHT - BOTTOM, MARGIN)
    front = [each for each in comparison.front if each in points]
    line = " ".join(f"{across(each.num_bytes or 0):.1f},{up(each.seconds or 0.0):.1f}" for each in front)
    shapes = [*_grid(points, across, up), f'<polyline class="front" points="{line}"/>']
    shapes += [_point(each, across(each.num_bytes or 0), up(each.seconds or 0.0), comparison) for each in points]
    words = "seconds of a step over bytes of tensors on a device; the line is the Pareto front"
    missing = len(known) - len(points)
    more = f"; {missing} that take over {SLOWEST:g} times the fastest are in the table alone" if missing else ""
    legend = f"filled: planned, open: estimated, square: put there by the user, ringed: taken; {words}{more}"
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    drawing = f'<svg class="chart" {box} role="img" aria-label="{escape(words)}">{"".join(shapes)}</svg>'
    return f'<div class="scroll">{drawing}</div><p class="soft">{escape(legend)}</p>'


def _scale(values: list[float], start: float, end: float) -> Callable[[float], float]:
    """Return what brings a value of an axis to its place, with some room around the least and the most."""
    least, most = min(values), max(values)
    room = 0.05 * (most - least) or 0.05 * most or 1.0
    return lambda value: start + (value - least + room) / (most - least + 2 * room) * (end - start)


def _ticks(values: list[float]) -> list[float]:
    """Return about NUM_TICKS round numbers between the least and the most."""
    least, most = min(values), max(values)
    if least == most:
        return [least]
    raw = (most - least) / NUM_TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [number * step for number in range(math.ceil(least / step), math.floor(most / step) + 1)]


def _grid(points: list[Contender], across: Callable[[float], float], up: Callable[[float], float]) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for value in _ticks([each.num_bytes or 0 for each in points]):
        x = across(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{format_bytes(value)}</text>'
    for value in _ticks([each.seconds or 0.0 for each in points]):
        y = up(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_seconds(value)}</text>'


def _point(each: Contender, x: float, y: float, comparison: Comparison) -> str:
    """Draw a candidate with its recipe, step and memory as a tooltip; with its mesh, if it is taken or the user's."""
    is_taken = each is taken_of(comparison)
    about = "" if each.is_planned else f"{ABOUT} "
    words = f"{each.recipe}: {about}{format_seconds(each.seconds or 0)}, {format_bytes(each.num_bytes or 0)}"
    kind = "compared" if each.is_compared else "planned" if each.is_planned else "estimated"
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/>'
    if each.is_compared:
        shape = f'<rect x="{x - RADIUS:.1f}" y="{y - RADIUS:.1f}" width="{2 * RADIUS}" height="{2 * RADIUS}"/>'
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="{2 * RADIUS}"/>' if is_taken else ""
    anchor, offset = ("end", -14) if x > WIDTH / 2 else ("start", 14)
    name = f'<text x="{x + offset:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{escape(each.name)}</text>'
    label = name if is_taken or each.is_compared else ""
    return f'<g class="{kind}"><title>{escape(words)}</title>{ring}{shape}{label}</g>'


def _cells(each: Contender, comparison: Comparison) -> list[str]:
    apart = each.apart
    by = "plan" if each.is_planned else "estimate" if each.seconds is not None else each.excluded
    if each.is_compared or each is taken_of(comparison):
        by += ", compared" if each.is_compared else ", taken"
    more = (detail(each), first_line(each.reason) if each.reason else "")
    cells = [
        each.name,
        "" if each.seconds is None else format_seconds(each.seconds),
        "" if apart is None else f"{apart:+.1%}",
        "" if each.num_bytes is None else format_bytes(each.num_bytes),
        str(each.microbatches),
        schedule_words(each),
        by,
        "; ".join(part for part in more if part),
    ]
    return [escape(cell) for cell in cells]
