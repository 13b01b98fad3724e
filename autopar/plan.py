"""The Plan: every choice, what it is predicted to cost, and for which graph and mesh it was made.

A plan is plain JSON: it is saved, compared and loaded again without solving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.errors import PlanError
from autopar.mesh import Mesh

FORMAT = 1


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One decision as the table shows it."""

    name: str
    kind: str
    module: str
    operation: str
    roles: tuple[str, ...]
    """Per mesh axis: "data", "column", … , "replicated", "partial", or the factor where it has no role."""
    layout: str
    """Layout of the (first) output."""
    seconds: float
    transfers: tuple[tuple[str, str, int], ...]
    """(collective, axis, bytes) of everything that this decision and its inbound reshards move in a step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice per decision with predictions. `print(plan)` is a table; `save` and `load` keep it as JSON.

    `seconds` is the predicted step, `bound` a proven lower bound of it under the same cost model, `peak_bytes` the
    predicted memory per device, `traffic` bytes per (collective, axis) and step in NCCL's convention.
    """

    mesh: Mesh
    fingerprint: str
    choices: Mapping[str, str]
    """Decision → the name of its strategy."""
    descriptions: Mapping[str, str]
    """Decision → what it decides on, for the difference between two graphs."""
    rows: tuple[PlanRow, ...]
    seconds: float
    bound: float
    peak_bytes: int
    traffic: Mapping[tuple[str, str], int]
    solver: str
    memory_limit: int | None = None
    unruled: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        from autopar.report import plan_table

        return plan_table(self)

    @property
    def gap(self) -> float:
        """Relative distance between the plan and the proven bound; 0 means proven optimal."""
        return 0.0 if self.seconds <= self.bound else (self.seconds - self.bound) / self.seconds

    def to_json(self) -> str:
        """The plan as JSON text."""
        values = asdict(self)
        values["mesh"] = {"axes": dict(self.mesh.axes), "hardware": self.mesh.hardware}
        values["traffic"] = [[collective, axis, count] for (collective, axis), count in sorted(self.traffic.items())]
        return json.dumps({"format": FORMAT, **values}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from JSON text; PlanError where the text is no plan."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a plan: the text is no JSON ({error}); give what Plan.save wrote.") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise PlanError(f"not a plan of format {FORMAT}; give what Plan.save of this version wrote.")
        try:
            values["mesh"] = Mesh(values["mesh"]["axes"], values["mesh"]["hardware"])
            values["traffic"] = {(collective, axis): count for collective, axis, count in values["traffic"]}
            values["rows"] = tuple(
                PlanRow(**{**row, "roles": tuple(row["roles"]), "transfers": tuple(map(tuple, row["transfers"]))})
                for row in values["rows"]
            )
            values["notes"] = tuple(values["notes"])
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"not a plan: {error!r}; a field is missing, unknown or malformed: give what Plan.save wrote."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON file."""
        return cls.from_json(Path(path).read_text())
