"""Predicted against measured, a point for each row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.publications.prediction import Outcome
from benchmarks.publications.report import group


def scatter(found: Sequence[Outcome], path: str | Path) -> None:
    """Write a PNG with the seconds of each row, predicted over measured, on logarithmic axes; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grouped: dict[str, list[Outcome]] = defaultdict(list)
    for each in found:
        if each.predicted is not None and each.row.seconds:
            grouped[group(each)].append(each)
    figure, axes = pyplot.subplots(figsize=(6.4, 5.6), dpi=120)
    for name, own in sorted(grouped.items()):
        measured = [each.row.seconds or 1.0 for each in own]
        axes.plot(measured, [each.seconds for each in own], "o", markersize=3, alpha=0.6, label=name)
    every = [value for own in grouped.values() for each in own for value in (each.row.seconds or 1.0, each.seconds)]
    ends = (min(every) / 1.3, max(every) * 1.3)
    axes.plot(ends, ends, color="black", linewidth=0.8, label="equal")
    axes.plot(ends, [0.8 * each for each in ends], color="grey", linewidth=0.6, linestyle="--", label="20% off")
    axes.plot(ends, [1.2 * each for each in ends], color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured seconds of a step", ylabel="predicted seconds of a step")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
