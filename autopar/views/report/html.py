"""A plan as one page: header, memory, time and notes as HTML and SVG, the rows as JSON that the page makes a tree of.

The page loads nothing. Its tree folds numbered modules as the table does and builds what is opened, so that plans of
many layers open at once. Rows are stored by columns of indices into shared texts, which keeps the file small.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from autopar.console.tables import Fact
from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.decision_rows import ROLES, Instant, KeptWhole, PlanRow, advice_on_rules, is_main
from autopar.costs.plans.plan import Plan
from autopar.views.inspection.breakdown import breakdown
from autopar.views.report.comparison_chart import comparison_section
from autopar.views.report.facts import plan_facts
from autopar.views.report.html_parts import html_table
from autopar.views.report.table import KEPT_WHOLE_HEADERS, KEPT_WHOLE_TITLE, kept_whole_row, kind_words

TEMPLATE = Path(__file__).with_name("plan.html")
WIDTH, HEIGHT = 1000, 220  # drawing size, in SVG units
MAX_POINTS = 1000  # points of the curve; each is the maximum of its instants
MAX_KINDS = 24  # operations with a bar of their own
NUM_COLOURS = 8


def page(plan: Plan) -> str:
    """Return the whole page as HTML text."""
    parts = {
        "title": f"Plan for {escape(str(plan.mesh))}",
        "header": _header(plan),
        "legend": _legend(plan),
        "memory": memory_section(plan),
        "time": time_section(plan),
        "comparison": comparison_section(plan.comparison),
        "notes": _notes(plan),
        "data": _embedded(_script_data(plan)),
    }
    # One pass, so that nothing of the plan is taken for a placeholder.
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)


def _header(plan: Plan) -> str:
    mesh = plan.mesh
    facts = [
        Fact("mesh", f"{mesh} ({mesh.num_devices} devices)"),
        Fact("hardware profile", mesh.hardware),
        *plan_facts(plan),
    ]
    return fact_items(facts)


def fact_items(facts: Iterable[Fact]) -> str:
    """Return facts as entries of a list of definitions."""
    return "".join(f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.text)}</dd></div>" for fact in facts)


def _legend(plan: Plan) -> str:
    """Return a chip per role with its meaning, and the mark of pinned rows if there are any."""
    chips = "".join(f'<span class="chip {role}" title="{escape(words)}">{role}</span>' for role, words in ROLES.items())
    pinned = '<span class="mode">pinned</span> by an annotation' if any(row.pinned for row in plan.rows) else ""
    return chips + pinned


def memory_section(plan: Plan) -> str:
    """Return the bar of a device against the limit, its parts as a table, and the live bytes over the step."""
    parts = dict(plan.memory.parts) if plan.memory else {}
    named = sum(parts.values())
    if plan.peak_bytes > named:
        parts["not told apart"] = plan.peak_bytes - named
    parts |= plan.reserved.parts(plan.peak_bytes)
    sizes = sorted(((name, count) for name, count in parts.items() if count), key=lambda part: -part[1])
    whole = max(sum(parts.values()), plan.memory_limit or 0, 1)
    bars, left = [], 0.0
    for number, (name, count) in enumerate(sizes):
        width = WIDTH * count / whole
        title = f"<title>{escape(name)} {format_bytes(count)}</title>"
        bars.append(
            f'<rect class="part{number % NUM_COLOURS}" x="{left:.1f}" width="{width:.1f}" height="40">{title}</rect>'
        )
        left += width
    words = f"each of {plan.mesh.num_devices} devices: {plan.reserved.both(plan.peak_bytes)} at the peak"
    if plan.memory_limit is not None:
        at = WIDTH * plan.memory_limit / whole
        bars.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="40"/>')
        words += (
            f", {plan.reserved_bytes / max(plan.memory_limit, 1):.0%} of the limit of {format_bytes(plan.memory_limit)}"
        )
    drawing = _drawing("".join(bars), 40, words)
    rows = [
        (_key(number) + escape(name), format_bytes(n), f"{n / whole:.1%}") for number, (name, n) in enumerate(sizes)
    ]
    of = "of the limit" if plan.memory_limit == whole else "share"
    table = html_table(("part", "bytes", of), rows)
    limit = None if plan.memory_limit is None else plan.reserved.tensors_within(plan.memory_limit)
    curve = _timeline(plan.memory.timeline, limit) if plan.memory and plan.memory.timeline else ""
    return f"<p>{words}</p>{drawing}{table}{curve}"


def _timeline(timeline: Sequence[Instant], limit: int | None) -> str:
    """Draw live bytes over the calls of a step, the limit as a dashed line."""
    highest = max(max(each.num_bytes for each in timeline), limit or 0, 1)
    scale = 0.95 * HEIGHT / highest
    stride = -(-len(timeline) // MAX_POINTS)
    groups = [timeline[start : start + stride] for start in range(0, len(timeline), stride)]
    tops = [max(each.num_bytes for each in group) for group in groups]
    step = WIDTH / len(groups)
    outline = " ".join(f"{x * step:.1f},{HEIGHT - top * scale:.1f}" for i, top in enumerate(tops) for x in (i, i + 1))
    turn = next((i for i, each in enumerate(timeline) if each.backward), len(timeline)) / len(timeline)
    peak = max(timeline, key=lambda each: each.num_bytes)
    shapes = f'<polygon class="live" points="0,{HEIGHT} {outline} {WIDTH},{HEIGHT}"/>'
    shapes += f'<line class="turn" x1="{turn * WIDTH:.1f}" x2="{turn * WIDTH:.1f}" y1="0" y2="{HEIGHT}"/>'
    if limit is not None:
        y = HEIGHT - limit * scale
        shapes += f'<line class="limit" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
    direction = "backward" if peak.backward else "forward"
    words = (
        f"live bytes over the calls of a step, highest {format_bytes(peak.num_bytes)} in the {direction} of {peak.name}"
    )
    line = f", dashed line: the limit of {format_bytes(limit)}" if limit is not None else ""
    ends = '<div class="ends"><span>forward</span><span>backward</span></div>'
    return f"<h3>Over the step</h3><p>{escape(words)}{line}</p>{_drawing(shapes, HEIGHT, words)}{ends}"


def time_section(plan: Plan) -> str:
    """Return the seconds by what is done, and compute by operation, as tables with bars."""
    shares = sorted(breakdown(plan).items(), key=lambda item: -item[1].seconds)
    kinds = [(name, share.seconds, format_bytes(share.num_bytes) if share.num_bytes else "") for name, share in shares]
    seconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for row in plan.rows:
        if row.kind == "call":
            seconds[row.operation] += row.forward_seconds + row.backward_seconds + row.recompute_seconds
            calls[row.operation] += 1
    ordered = sorted(((name, value) for name, value in seconds.items() if value), key=lambda item: -item[1])
    operations = [(name, value, str(calls[name])) for name, value in ordered[:MAX_KINDS]]
    if rest := ordered[MAX_KINDS:]:
        count = sum(calls[name] for name, _ in rest)
        operations.append((f"{len(rest)} more", sum(value for _, value in rest), str(count)))
    return (
        f"<div><h3>By kind, collective and axis</h3>{_bar_table(('what', 'bytes'), kinds, plan.seconds)}</div>"
        f"<div><h3>Compute by operation</h3>{_bar_table(('operation', 'calls'), operations, plan.seconds)}</div>"
    )


def _bar_table(names: tuple[str, str], rows: Iterable[tuple[str, float, str]], whole: float) -> str:
    """Return a table of (name, seconds, more) with a bar each, as long as its share of the longest."""
    rows = list(rows)
    longest = max((seconds for _, seconds, _ in rows), default=0.0)
    cells = []
    for name, seconds, more in rows:
        bar = f'<rect class="bar" width="{100 * max(seconds, 0) / longest if longest > 0 else 0:.1f}" height="10"/>'
        drawing = f'<svg class="small" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'
        share = f"{seconds / whole:.1%}" if whole > 0 else ""
        cells.append((escape(name), drawing, format_seconds(seconds), share, more))
    return html_table((names[0], "", "time", "of step", names[1]), cells)


def _notes(plan: Plan) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    text = (f"<ul>{notes}</ul>" if notes else "") + kept_whole_html(plan.kept_whole)
    return f'<section id="notes"><h2>Notes</h2>{text}</section>' if text else ""


def kept_whole_html(found: Sequence[KeptWhole]) -> str:
    """Return the operations that no rule fits with their shares of the step, and the advice on the longest."""
    if not found:
        return ""
    rows = [tuple(map(escape, kept_whole_row(each))) for each in found]
    table = html_table(KEPT_WHOLE_HEADERS, rows, numbers=(1, 3, 4, 5))
    return f"<h3>{KEPT_WHOLE_TITLE}</h3>{table}<p>{escape(advice_on_rules(found[0].operation))}</p>"


def _drawing(shapes: str, height: int, words: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none"'
    return f'<svg class="wide" {box} role="img" aria-label="{escape(words)}" style="height:{height}px">{shapes}</svg>'


def _key(number: int) -> str:
    shape = f'<rect class="part{number % NUM_COLOURS}" width="10" height="10"/>'
    return f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true">{shape}</svg>'


class _Texts:
    """Values that many rows share, each stored once."""

    def __init__(self) -> None:
        self.number: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self.number.setdefault(value, len(self.number))


def _script_data(plan: Plan) -> dict[str, Any]:
    """Return the data for the script of the page; the script names the columns in the same order."""
    position = {row.name: number for number, row in enumerate(plan.rows)}
    rows = sorted(plan.rows, key=lambda row: position.get(row.name.split("/")[0], position[row.name]))
    texts, choices, moves = _Texts(), _Texts(), _Texts()
    columns = [_columns(plan, row, texts, choices, moves) for row in rows]
    return {
        "axes": list(plan.mesh.names),
        "kinds": {kind: kind_words(kind) for kind in sorted({row.kind for row in rows})},
        "rows": columns,
        "texts": list(texts.number),
        "choices": list(choices.number),
        "moves": list(moves.number),
        "recompute": dict(plan.recompute),
    }


def _columns(plan: Plan, row: PlanRow, texts: _Texts, choices: _Texts, moves: _Texts) -> list[Any]:
    main = row.kind != "call" or is_main(row.operation)
    roles = tuple((role, colour_of(role)) for role in row.splits)
    saved = row.kind == "parameter" and plan.is_saved(row.name)
    mode = plan.recompute.get(row.segment, "none") if row.segment else "none"
    choice = (texts(row.operation), row.kind, roles, row.layout, main, saved, mode, row.pinned)
    moved = [
        (each.collective, each.axis, each.num_bytes, _short(each.seconds), each.backward) for each in row.transfers
    ]
    seconds = (row.seconds, row.forward_seconds, row.backward_seconds, row.recompute_seconds)
    numbers = [*map(_short, seconds), row.saved_bytes, row.stored_bytes]
    return [texts(row.module), texts(row.name), choices(choice), [moves(each) for each in moved], *numbers]


def colour_of(role: str) -> str:
    """Return the class of a role: its own word, or what a placement ("S(0)", "R", "I", "P") amounts to."""
    if role in ROLES:
        return role
    if role in ("R", "I"):
        return "replicated"
    return "partial" if role.startswith("P") else "other"


def _short(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def _embedded(values: Mapping[str, Any]) -> str:
    """Return JSON that may stand in a script element: nothing in it opens or closes a tag."""
    text = json.dumps(values, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
