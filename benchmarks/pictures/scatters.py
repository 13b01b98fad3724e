"""Predicted steps and measured ones, a point for each, from result files."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.pictures.style import COLOURS, INK, save

RESULTS = Path(__file__).parents[1] / "results"
Points = dict[str, list[tuple[float, float]]]


def small_models(path: Path) -> None:
    """Draw the plans of the small suite: milliseconds on two cores, from bench-small.csv."""
    points: Points = defaultdict(list)
    with (RESULTS / "bench-small.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["measured_seconds"] and row["predicted_seconds"]:
                pair = (float(row["measured_seconds"]) * 1e3, float(row["predicted_seconds"]) * 1e3)
                points[row["model"]].append(pair)
    _scatter(path, points, "ms", f"{sum(map(len, points.values()))} plans of small models on two cores")


def published(path: Path) -> None:
    """Draw the published steps that have a plan: seconds, from the rows of published.txt's first run."""
    points: Points = defaultdict(list)
    text = (RESULTS / "published.txt").read_text().split("seconds of a step")[0]
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) > 4 and re.fullmatch(r"[+-]\d+%", cells[4]):
            points[cells[0]].append((float(cells[3]), float(cells[2])))
    _scatter(path, points, "s", f"{sum(map(len, points.values()))} published training steps")


def _scatter(path: Path, points: Points, unit: str, title: str) -> None:
    figure, axes = pyplot.subplots(figsize=(5.4, 4.6))
    for number, (name, own) in enumerate(sorted(points.items())):
        axes.scatter(*zip(*own, strict=True), s=10, color=COLOURS[number], alpha=0.7, linewidths=0, label=name)
    every = [value for own in points.values() for pair in own for value in pair]
    ends = (min(every) / 1.3, max(every) * 1.3)
    axes.plot(ends, ends, color=INK, linewidth=0.9, label="equal")
    for share in (0.8, 1.2):
        label = "20% apart" if share < 1 else None
        axes.plot(ends, [share * each for each in ends], color=INK, linewidth=0.7, linestyle="--", label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel=f"measured step, {unit}", ylabel=f"predicted step, {unit}", title=title)
    for each in (axes.xaxis, axes.yaxis):
        _plain_numbers(each, ends[1] / ends[0])
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, title)
    pyplot.close(figure)


def _plain_numbers(axis: Any, span: float) -> None:
    """Write plain numbers at powers of ten, at 2 and 5 between them if there is space."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1e3 else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
