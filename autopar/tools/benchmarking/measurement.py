"""Predicted and measured costs of a strategy for one model on one mesh, stored as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.files.replace import replace_text
from autopar.tools.calibration.medians import standard_error

TOLERANCE = 1e-3  # relative, of a loss: fp32 sums in another order, amplified by the steps before
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Costs:
    """One step on one rank: seconds, bytes at its highest moment, and bytes by "collective/axis"."""

    seconds: float
    peak_bytes: int
    traffic: Mapping[str, int]

    @property
    def total_traffic(self) -> int:
        """Bytes of all collectives."""
        return sum(self.traffic.values())


@dataclass(frozen=True, slots=True)
class Measurement:
    """A strategy in a cell, which is a model on a mesh."""

    model: str
    mesh: str
    strategy: str
    measured: Costs | None = None
    """Costs of the slowest rank (median of the steps) and of the rank with the highest peak memory."""
    predicted: Costs | None = None
    """Costs predicted by autopar's plan, whose `seconds` the solver minimizes; None for a peer."""
    timeline_seconds: float | None = None
    """The predicted step as the plan's timeline has it."""
    reason: str = ""
    """Why nothing was measured."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """"collective/axis" → how often in a step."""
    quartiles: tuple[float, float] = (0.0, 0.0)
    """Seconds that a quarter of the steps stay below, and above."""
    num_steps: int = 0
    """Number of steps behind the median and the quartiles."""
    setup_seconds: float = 0.0
    """Seconds to plan and rewrite the model, or to wrap it."""
    same_as: str = ""
    """Another strategy that makes the same program of the model: its steps are those of this one, too."""
    apart: float | None = None
    """The largest relative difference of its losses from those of one process; None where they are not compared."""

    @property
    def cell(self) -> tuple[str, str]:
        """The model and the mesh."""
        return self.model, self.mesh

    @property
    def agrees(self) -> bool:
        """True if the losses agree with those of one process, or were not compared."""
        return self.apart is None or self.apart <= TOLERANCE  # False for a loss that is no number

    @property
    def relative_error(self) -> float:
        """The standard error of the median step, relative to it, if steps vary normally; nan of fewer than two."""
        if self.measured is None or self.num_steps < 2:
            return math.nan
        low, high = self.quartiles
        return standard_error(high - low, self.num_steps) / self.measured.seconds

    @property
    def moved_as_predicted(self) -> bool | None:
        """True if each collective moved the predicted bytes; None unless both are known."""
        if self.measured is None or self.predicted is None:
            return None
        return _without_zeros(self.measured.traffic) == _without_zeros(self.predicted.traffic)


def _without_zeros(traffic: Mapping[str, int]) -> dict[str, int]:
    return {name: num_bytes for name, num_bytes in traffic.items() if num_bytes}


def to_json(measurements: Sequence[Measurement], about: Mapping[str, str]) -> str:
    """Return the measurements as text, with what is known about the machine and the run."""
    rows = [asdict(each) for each in measurements]
    for row in rows:
        row["apart"] = None if row["apart"] is None else repr(row["apart"])  # JSON has no number for nan
    return json.dumps({"format": FORMAT, "about": dict(about), "measurements": rows}, indent=1)


def from_json(text: str) -> tuple[list[Measurement], dict[str, str]]:
    """Read the measurements and the description of the run that `to_json` wrote.

    Raises InputError if the text is anything else.
    """
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise InputError(f"measurements of format {values['format']}, not {FORMAT}; measure again.")
        return [_measurement(row) for row in values["measurements"]], values["about"]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"no measurements: {error!r}; give what `autopar bench --json` wrote.") from error


def _measurement(row: Mapping[str, Any]) -> Measurement:
    costs = {name: None if row[name] is None else Costs(**row[name]) for name in ("measured", "predicted")}
    apart = None if row["apart"] is None else float(row["apart"])
    return Measurement(**{**row, **costs, "quartiles": tuple(row["quartiles"]), "apart": apart})


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write a line per measurement; counts by collective are JSON in one column, unknown values are empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _COLUMNS)
    writer.writeheader()
    writer.writerows(map(_line, measurements))
    replace_text(path, text.getvalue())


_COSTS = tuple(each.name for each in fields(Costs))
_WHICH = ("model", "mesh", "strategy", "same_as", "reason")
_COLUMNS = (
    *_WHICH,
    *(f"{kind}_{name}" for kind in ("measured", "predicted") for name in _COSTS),
    *("timeline_seconds", "seconds_low", "seconds_high", "num_steps", "calls", "setup_seconds", "apart", "agrees"),
)


def _line(measurement: Measurement) -> dict[str, Any]:
    line: dict[str, Any] = {name: getattr(measurement, name) for name in _WHICH}
    for kind in ("measured", "predicted"):
        costs = getattr(measurement, kind)
        if costs is not None:
            line |= {f"{kind}_{name}": getattr(costs, name) for name in _COSTS}
            line[f"{kind}_traffic"] = json.dumps(dict(costs.traffic))
    if measurement.measured is not None:
        line |= {
            "timeline_seconds": measurement.timeline_seconds,
            "seconds_low": measurement.quartiles[0],
            "seconds_high": measurement.quartiles[1],
            "num_steps": measurement.num_steps,
            "calls": json.dumps(dict(measurement.calls)),
            "setup_seconds": measurement.setup_seconds,
            "apart": measurement.apart,
            "agrees": measurement.agrees,
        }
    return line


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference, nan where one is no number."""
    differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True)]
    return math.nan if any(math.isnan(each) for each in differences) else max(differences)
