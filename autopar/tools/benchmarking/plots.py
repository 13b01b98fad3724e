"""Measurements as pictures: predicted against measured time, and memory and moved bytes by strategy."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.files.replace import replace_bytes
from autopar.tools.benchmarking.measurement import Costs, Measurement
from autopar.tools.benchmarking.rank_correlation import spearman

MEGABYTE = 1e6
MILLISECOND = 1e-3


def save_plots(measurements: Sequence[Measurement], folder: str | Path) -> list[Path]:
    """Write time.png, memory.png and traffic.png into the folder, which is made where it is missing.

    Raises InputError without matplotlib, where nothing was measured, or where the folder cannot be written.
    """
    pyplot = require_pyplot()
    if not any(each.measured for each in measurements):
        raise InputError("nothing was measured, so there is nothing to draw; see the reasons in the tables.")
    folder = Path(folder)
    pictures: dict[str, Callable[[Any, Sequence[Measurement]], Any]] = {
        "time.png": _times,
        "memory.png": _memory,
        "traffic.png": _traffic,
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in pictures.items():
            figure = draw(pyplot, measurements)
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
            pyplot.close(figure)
            replace_bytes(folder / name, picture.getvalue())
            written.append(folder / name)
    except OSError as error:
        raise InputError(f"the plots cannot be written: {error}; give a folder that can.") from error
    return written


def require_pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files; raise InputError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError(
            'plots need the matplotlib package, which is not installed; pip install "autopar[bench]".'
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _times(pyplot: Any, measurements: Sequence[Measurement]) -> Any:
    """Return a point per plan on logarithmic axes, a colour per model; on the line the prediction is right."""
    figure, axes = pyplot.subplots(figsize=(6, 6))
    found = [(each, each.predicted, each.measured) for each in measurements]
    pairs = [(m, p.seconds / MILLISECOND, q.seconds / MILLISECOND) for m, p, q in found if p and q]
    for number, model in enumerate(dict.fromkeys(each.model for each, _, _ in pairs)):
        own = [(ours, theirs) for each, ours, theirs in pairs if each.model == model]
        axes.scatter(*zip(*own, strict=True), label=model, color=f"C{number}", alpha=0.7)
    if pairs:
        ends = [min(min(pair[1:]) for pair in pairs), max(max(pair[1:]) for pair in pairs)]
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.legend()
    axes.set(xscale="log", yscale="log", xlabel="predicted step, ms", ylabel="measured step, ms")
    for each in (axes.xaxis, axes.yaxis):  # plain numbers at 1, 2, 5, 10 …: powers of ten overlap
        each.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        each.set_major_formatter("{x:g}")
        each.set_minor_formatter(pyplot.matplotlib.ticker.NullFormatter())
    correlation = spearman([ours for _, ours, _ in pairs], [theirs for _, _, theirs in pairs])
    axes.set_title(f"{len(pairs)} plans: Spearman's ρ = {correlation:.3f}")
    return figure


def _memory(pyplot: Any, measurements: Sequence[Measurement]) -> Any:
    return _bars(pyplot, measurements, "peak memory per rank, MB", lambda costs: costs.peak_bytes)


def _traffic(pyplot: Any, measurements: Sequence[Measurement]) -> Any:
    return _bars(pyplot, measurements, "moved per rank and step, MB", lambda costs: costs.total_traffic)


def _bars(pyplot: Any, measurements: Sequence[Measurement], label: str, of: Callable[[Costs], int]) -> Any:
    """Return a panel per cell: what each strategy measured, and a mark at what was predicted."""
    cells = [cell for cell in dict.fromkeys(each.cell for each in measurements) if _of_cell(measurements, cell)]
    tallest = max(len(_of_cell(measurements, cell)) for cell in cells)
    figure, panels = pyplot.subplots(
        len(cells), figsize=(7, len(cells) * (0.8 + 0.25 * tallest)), squeeze=False, layout="constrained"
    )
    for cell, axes in zip(cells, panels[:, 0], strict=True):
        own = _of_cell(measurements, cell)
        names = [each.strategy for each, _ in own]
        axes.barh(names, [of(costs) / MEGABYTE for _, costs in own], color="C0", alpha=0.7, label="measured")
        marks = [(of(each.predicted) / MEGABYTE, each.strategy) for each, _ in own if each.predicted]
        if marks:
            axes.scatter(*zip(*marks, strict=True), color="black", marker="|", s=120, label="predicted", zorder=3)
        axes.invert_yaxis()
        axes.set_title(" on ".join(cell), fontsize="medium", loc="left")
    panels[0, 0].legend(fontsize="small")
    panels[-1, 0].set_xlabel(label)
    return figure


def _of_cell(measurements: Sequence[Measurement], cell: tuple[str, str]) -> list[tuple[Measurement, Costs]]:
    return [(each, each.measured) for each in measurements if each.cell == cell and each.measured is not None]
