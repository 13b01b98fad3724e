"""Measurements as tables: one per cell, fastest first, and how well predictions order the measurements of all cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from autopar.console.units import format_bytes, format_seconds
from autopar.tools.benchmarking.measurement import Measurement
from autopar.tools.benchmarking.rank_correlation import spearman

HEADERS = (
    *("strategy", "step", "ratio", "predicted", "timeline", "peak", "predicted"),
    *("moved", "bytes", "collectives", "setup", "losses"),
)
LONGEST_REASON = 200  # characters
ALIGNED = ("left", *("right",) * 7, "left", "right", "right", "left")


def report(measurements: Sequence[Measurement], about: Mapping[str, str]) -> str:
    """Return all tables, the setup above and the summary below."""
    known = tabulate(list(about.items()), tablefmt="plain", disable_numparse=True)
    cells = dict.fromkeys(each.cell for each in measurements)
    tables = [cell_table([each for each in measurements if each.cell == cell]) for cell in cells]
    return "\n\n".join([known, *tables, summary(measurements)])


def cell_table(measurements: Sequence[Measurement]) -> str:
    """Return the strategies of one cell by their step time; below, why others were not measured."""
    model, mesh = measurements[0].cell
    measured = sorted(_measured(measurements), key=lambda found: found[1])
    fastest = measured[0][1] if measured else math.nan
    rows = [_row(each, fastest) for each, _ in measured]
    lines = [f"{model} on {mesh}"]
    if rows:
        lines.append(tabulate(rows, headers=HEADERS, colalign=ALIGNED, disable_numparse=True))
    lines += [f"  {each.strategy}: {_shortened(each.reason)}" for each in measurements if each.measured is None]
    return "\n".join(lines)


def _measured(measurements: Sequence[Measurement]) -> list[tuple[Measurement, float]]:
    """Return the measurements of strategies that ran, each with its seconds per step."""
    return [(each, each.measured.seconds) for each in measurements if each.measured is not None]


def _row(each: Measurement, fastest: float) -> tuple[str, ...]:
    assert each.measured is not None
    predicted = each.predicted
    as_predicted = {None: "", True: "as predicted", False: "NOT AS PREDICTED"}[each.moved_as_predicted]
    return (
        f"{each.strategy} = {each.same_as}" if each.same_as else each.strategy,
        format_seconds(each.measured.seconds),
        f"{each.measured.seconds / fastest:.2f}",
        format_seconds(predicted.seconds) if predicted else "",
        format_seconds(each.timeline_seconds) if each.timeline_seconds else "",
        format_bytes(each.measured.peak_bytes),
        format_bytes(predicted.peak_bytes) if predicted else "",
        format_bytes(each.measured.total_traffic),
        as_predicted,
        str(sum(each.calls.values())),
        format_seconds(each.setup_seconds),
        _losses(each),
    )


def _losses(each: Measurement) -> str:
    if each.apart is None:
        return "not compared"
    return f"{'agree' if each.agrees else 'DISAGREE'} ({each.apart:.0e})"


def _shortened(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]} …"


def summary(measurements: Sequence[Measurement]) -> str:
    """Compare predictions with measurements over all cells, and autopar's plan with the fastest alternatives."""
    pairs = [(each.predicted, each.measured) for each in measurements if each.predicted and each.measured]
    timelines = [
        (each.timeline_seconds, each.measured.seconds)
        for each in measurements
        if each.timeline_seconds and each.measured
    ]
    lines = []
    if len(pairs) > 1:
        lines += _compared("step time", [(ours.seconds, theirs.seconds) for ours, theirs in pairs])
        lines[1:1] = _within_cells(measurements)
    if len(timelines) > 1:
        lines += _compared("timeline", timelines)
    if pairs:
        errors = [(theirs.peak_bytes - ours.peak_bytes) / ours.peak_bytes for ours, theirs in pairs]
        lines.append(f"peak memory  {min(errors):+.1%} to {max(errors):+.1%} of the predicted")
        equal = sum(each.moved_as_predicted is True for each in measurements)
        lines.append(f"bytes        as predicted in {equal} of {len(pairs)}")
    disagreeing = [f"{each.strategy} in {' on '.join(each.cell)}" for each in measurements if not each.agrees]
    compared = sum(each.apart is not None for each in measurements)
    if disagreeing:
        lines.append(f"losses       DISAGREE: {', '.join(disagreeing)}")
    elif compared:
        lines.append(f"losses       agree in all {compared}")
    lines += _auto_against_the_best(measurements)
    return "\n".join(lines)


def _compared(name: str, pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Return lines on how well predicted seconds order the measured ones, and on the ratios between them."""
    predicted, measured = zip(*pairs, strict=True)
    factors = sorted(theirs / ours for ours, theirs in pairs)
    middle = factors[len(factors) // 2]
    return [
        f"{name:<12} rank correlation (Spearman) {spearman(predicted, measured):.3f} of {len(pairs)} predictions",
        f"             measured / predicted {factors[0]:.2f} to {factors[-1]:.2f}, median {middle:.2f}",
    ]


def _within_cells(measurements: Sequence[Measurement]) -> list[str]:
    """Return the same correlation inside each cell, where models do not differ; the mean of the cells that have
    three.
    """
    found = []
    for cell in dict.fromkeys(each.cell for each in measurements):
        own = [each for each in measurements if each.cell == cell]
        pairs = [(each.predicted.seconds, each.measured.seconds) for each in own if each.predicted and each.measured]
        if len(pairs) > 2:
            value = spearman([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
            found += [] if math.isnan(value) else [value]
    if not found:
        return []
    mean = sum(found) / len(found)
    return [f"             inside a cell {min(found):.2f} to {max(found):.2f}, mean {mean:.2f} of {len(found)} cells"]


def _auto_against_the_best(measurements: Sequence[Measurement]) -> list[str]:
    """Return the step of autopar's plan over the fastest of the presets and over the fastest of the peers, cell by
    cell.
    """
    lines = []
    for cell in dict.fromkeys(each.cell for each in measurements):
        measured = [each for each, _ in _measured([each for each in measurements if each.cell == cell])]
        auto = next((each for each in measured if each.strategy == "auto"), None)
        others = [each for each in measured if each.strategy != "auto"]
        if auto is not None and others:
            presets = [each for each in others if each.predicted]
            peers = [each for each in others if not each.predicted]
            lines.append((" on ".join(cell), *_ratio_to_best(auto, presets), *_ratio_to_best(auto, peers)))
    if not lines:
        return []
    headers = ("cell", "auto / best preset", "which is", "auto / best peer", "which is")
    align = ("left", "right", "left", "right", "left")
    return ["", tabulate(lines, headers=headers, colalign=align, disable_numparse=True)]


def _ratio_to_best(auto: Measurement, others: Sequence[Measurement]) -> tuple[str, str]:
    """Return the ratio of the medians, with twice its standard error, and the name of the best."""
    measured = _measured(others)
    if not measured or auto.measured is None:
        return "", ""
    best, seconds = min(measured, key=lambda found: found[1])
    ratio = auto.measured.seconds / seconds
    if auto.same_as == best.strategy:
        return f"{ratio:.2f}", best.strategy
    error = 2 * ratio * math.hypot(auto.relative_error, best.relative_error)
    return (f"{ratio:.2f}" if math.isnan(error) else f"{ratio:.2f} ± {error:.2f}"), best.strategy
