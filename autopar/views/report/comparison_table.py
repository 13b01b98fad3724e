"""The candidates of `mesh="auto"` as text: a line per distinct answer, and how the others were left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.console.tables import fitted_table, wrapped
from autopar.console.units import format_bytes, format_seconds, format_share
from autopar.costs.plans.comparison import EXCLUDED, Comparison, Contender

MOST_ESTIMATES = 8
"""Lines of candidates that were not planned; each mesh once."""
MOST_REASONS = 8
MOST_MESHES = 3
"""Named with a reason."""
MOST_CHARACTERS = 160
"""Longest part of a reason that is shown, in characters."""
ABOUT = "≈"
HEADERS = ("", "mesh", "step", "by estimate", "tensors", "microbatches", "schedule")
RIGHT = (2, 3, 4, 5)
TAKEN, COMPARED, TIMES = "→", "+", "×"
LEGEND = {
    TAKEN: f"{TAKEN} the plan that is taken",
    COMPARED: f"{COMPARED} put next to the candidates by the user",
    TIMES: f"{TIMES} 2 behind a schedule: 2 stages on each rank",
    ABOUT: f"{ABOUT} estimated, not planned; for plans, how far the plan is from its estimate",
}


def comparison_text(comparison: Comparison) -> list[str]:
    """Return the parts of the text: the count, the table with its legend, details of plans, and reasons."""
    lines = [*comparison.planned, *shown_estimates(comparison)]
    taken = taken_of(comparison)
    table = _without_empty_columns([_row(each, each is taken) for each in lines])
    legend = [LEGEND[TAKEN], *([LEGEND[COMPARED]] if any(each.is_compared for each in lines) else [])]
    legend += [LEGEND[TIMES]] if any(each.stages_per_rank > 1 for each in lines) else []
    legend += [LEGEND[ABOUT]] if any(each.estimate is not None for each in lines) else []
    details = [f"{each.recipe}: {words}" for each in comparison.planned if (words := detail(each))]
    parts = [f"{wrapped(summary(comparison))}\n\n{table}", legend, details, reasons(comparison)]
    return [part if isinstance(part, str) else "\n".join(map(wrapped, part)) for part in parts if part]


def _without_empty_columns(rows: Sequence[Sequence[str]]) -> str:
    shown = [column for column in range(len(HEADERS)) if any(row[column] for row in rows)]
    right = [number for number, column in enumerate(shown) if column in RIGHT]
    cells = [[row[column] for column in shown] for row in rows]
    return fitted_table(cells, [HEADERS[column] for column in shown], right)


def taken_of(comparison: Comparison) -> Contender | None:
    """Return the plan that is taken: the best one that the user did not put there."""
    return next((each for each in comparison.planned if not each.is_compared), None)


def shown_estimates(comparison: Comparison) -> list[Contender]:
    """Return the best estimate of each mesh that has no plan, a few of them."""
    known = {mesh for each in comparison.planned for mesh in (each.mesh, *each.same_on)}
    found: dict[object, Contender] = {}
    for each in comparison.estimated:
        if each.mesh not in known:
            found.setdefault(each.mesh, each)
    return list(found.values())[:MOST_ESTIMATES]


def summary(comparison: Comparison) -> str:
    """Count candidates by what became of them, and say how far estimates were off.

    Example: "compared: 16 candidates (a mesh with its micro-batches), 3 planned, 12 estimated, 1 no better by a bound"
    """
    own = [each for each in comparison.contenders if not each.is_compared]
    planned, estimated = (
        sum(each.is_planned for each in own),
        sum(each.seconds is not None and not each.is_planned for each in own),
    )
    counts = [f"{planned} planned", *([f"{estimated} estimated"] if estimated else [])]
    for kind, words in EXCLUDED.items():
        count = sum(each.excluded == kind and each.seconds is None for each in own)
        counts += [f"{count} {words}"] if count else []
    joined = sum(len(each.same_on) for each in own)
    counts += [f"{joined} the same with axes joined"] if joined else []
    text = f"compared: {len(own) + joined} candidates (a mesh with its micro-batches): {', '.join(counts)}"
    apart = [abs(each.apart) for each in own if each.apart is not None]
    if apart:
        text += f"; plans are up to {format_share(max(apart))} from their estimates"
    if comparison.num_late:
        text += f"; the time ended before {comparison.num_late} more that may be better: give it a longer time limit"
    return "; ".join((text, *comparison.notes))


def _row(each: Contender, is_taken: bool) -> list[str]:
    assert each.seconds is not None and each.num_bytes is not None, "planned or estimated"
    apart = each.apart
    step = format_seconds(each.seconds)
    return [
        TAKEN if is_taken else COMPARED if each.is_compared else "",
        each.name,
        step if each.is_planned else f"{ABOUT} {step}",
        "" if apart is None else f"{apart:+.1%}",
        format_bytes(each.num_bytes),
        str(each.microbatches),
        schedule_words(each),
    ]


def schedule_words(each: Contender) -> str:
    """Return the name the schedule, with the stages of a rank if there are several."""
    return f"{each.schedule} {TIMES} {each.stages_per_rank}" if each.stages_per_rank > 1 else each.schedule


def detail(each: Contender) -> str:
    """Say what the plan of a candidate splits, stores and computes again, and where it is the same."""
    again = f"computed again: {each.recomputed}" if each.recomputed else ""
    stored = f"{format_bytes(each.parameter_bytes)} of parameters" if each.parameter_bytes else ""
    gap = "" if not each.gap else f"gap {format_share(each.gap)}"
    cut = "search cut short" if each.is_cut_short else ""
    same = f"the same on {', '.join(map(str, each.same_on))}" if each.same_on else ""
    return "; ".join(part for part in (each.splits, stored, again, gap, cut, same) if part)


def reasons(comparison: Comparison) -> list[str]:
    """List why candidates have no plan, equal reasons together."""
    found: defaultdict[str, list[Contender]] = defaultdict(list)
    for each in sorted(comparison.contenders, key=lambda each: each.excluded == "bound"):
        if each.reason:
            found[first_line(each.reason)].append(each)
    lines = [f"{_meshes(each)}: {reason}" for reason, each in found.items()]
    rest = len(lines) - MOST_REASONS
    return lines[:MOST_REASONS] + ([f"{rest} more reasons in plan.comparison"] if rest > 0 else [])


def first_line(reason: str) -> str:
    first = reason.splitlines()[0]
    return first if len(first) <= MOST_CHARACTERS else f"{first[: MOST_CHARACTERS - 1]}…"


def _meshes(each: Sequence[Contender]) -> str:
    names = list(dict.fromkeys(str(one.mesh) for one in each))
    rest = len(names) - MOST_MESHES
    return ", ".join(names[:MOST_MESHES]) + (f" and {rest} more meshes" if rest > 0 else "")
