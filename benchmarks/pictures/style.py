"""Colours, fonts and files of the pictures: SVG that reads on light and dark pages, the same after every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "autopar",
        "font.family": "sans-serif",
        "font.size": 9,
        "savefig.transparent": True,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), "#7b828b"),
    }
)

INK = "#7b828b"
"""Text and lines: contrast 4 on white and on the dark page."""
WHOLE = "#a3a9b1"
COLOURS = ("#4a7ec2", "#d9822b", "#3f9b6c", "#a65fa3", "#c8524f", "#3d9aa6", "#8d8a3a")


def save(figure: Any, path: Path, title: str) -> None:
    """Write a figure as SVG with its title, without date and version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"Title": title, "Date": None, "Creator": None}
    figure.savefig(path, format="svg", bbox_inches="tight", pad_inches=0.05, metadata=known)
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
