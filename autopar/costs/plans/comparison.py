"""The candidates of `mesh="auto"` next to the plan that was taken: step, memory, and why others are out.

A candidate is a mesh with a number of micro-batches and a schedule. Some are planned exactly, more are estimated, and
most are excluded before that. `Comparison.front` is the Pareto front of step and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from autopar.files.schema import Flag, ListOf, Maybe, OneOf, Real, Record, Table, Text, Whole
from autopar.ir.sharding.mesh import MAX_AXES, Mesh

Excluded = Literal["", "bound", "estimate", "memory", "time", "error"]
EXCLUDED: Mapping[str, str] = {
    "bound": "no better by a bound",
    "estimate": "clearly slower by an estimate",
    "memory": "no plan within the memory limit",
    "time": "not tried for lack of time",
    "error": "not possible",
}
"""Why a candidate has no plan and no estimate, in words."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A candidate with its step and memory, from its plan or from an estimate."""

    mesh: Mesh
    """Axes with their sizes."""
    microbatches: int = 1
    """Micro-batches of a step."""
    schedule: str = ""
    """Name of the pipeline's schedule; "" without a pipeline."""
    stages_per_rank: int = 1
    """Stages on each rank of the pipeline."""
    seconds: float | None = None
    """Seconds of a step of all micro-batches; None if it is neither planned nor estimated."""
    num_bytes: int | None = None
    """Bytes of tensors on a device at the peak."""
    is_planned: bool = False
    """True if it has a plan, and not an estimate alone."""
    is_compared: bool = False
    """True for a plan that the user put next to the candidates."""
    requested: str = ""
    """The recipe by which the user did."""
    estimate: float | None = None
    """Seconds by its estimate, which a plan may have, too."""
    excluded: Excluded = ""
    """Reason why it has neither plan nor estimate, a key of EXCLUDED; "" if it has one."""
    reason: str = ""
    """Why it has no plan, in words."""
    gap: float | None = None
    """Share of the step that another plan on its mesh could save at most; None if nothing is proven."""
    is_cut_short: bool = False
    """True if its search ended before its plan was proven as far as others are."""
    parameter_bytes: int = 0
    """Bytes of parameters on the device that has the most."""
    recomputed: str = ""
    """Description of what is recomputed."""
    splits: str = ""
    """Description of what each axis splits."""
    same_on: tuple[Mesh, ...] = ()
    """Meshes whose plans are the same, with axes joined or divided."""

    @property
    def recipe(self) -> str:
        """The candidate as `autopar plan --compare` takes it, and `--mesh` with the flags behind it.

        >>> Contender(Mesh({"pp": 2, "dp": 4}), 8, "1f1b").recipe
        'pp=2,dp=4 --microbatches 8 --schedule 1f1b'
        """
        if self.requested:
            return self.requested
        words = [",".join(f"{name}={size}" for name, size in self.mesh.axes.items())]
        words += [f"--microbatches {self.microbatches}"] if self.microbatches > 1 else []
        words += [f"--schedule {self.schedule}"] if self.schedule else []
        words += [f"--stages-per-rank {self.stages_per_rank}"] if self.stages_per_rank > 1 else []
        return " ".join(words)

    @property
    def name(self) -> str:
        """The mesh, with what the user's recipe says besides how it runs."""
        words = self.requested.split()[1:]
        pairs = zip(words[::2], words[1::2], strict=True)
        others = [
            f"{flag} {value}"
            for flag, value in pairs
            if flag not in ("--microbatches", "--schedule", "--stages-per-rank")
        ]
        return " ".join((str(self.mesh), *others))

    @property
    def runs(self) -> tuple[int, str, int]:
        """Micro-batches, schedule, and stages on each rank."""
        return self.microbatches, self.schedule, self.stages_per_rank

    @property
    def apart(self) -> float | None:
        """Relative difference of the plan's seconds from their estimate; None unless both are known."""
        if not self.is_planned or self.seconds is None or not self.estimate:
            return None
        return self.seconds / self.estimate - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """All candidates: those with a plan, best first, the estimated ones, best first, then those that are excluded."""

    contenders: tuple[Contender, ...]
    """The candidates, in this order."""
    num_late: int = 0
    """Candidates that may be better by their estimates, and were not planned as time was over."""
    notes: tuple[str, ...] = ()
    """Notes on a search that is not as usual: without estimates, or of a model that is captured whole again."""

    @property
    def planned(self) -> tuple[Contender, ...]:
        """Candidates with a plan, best first, with those that the user put next to them."""
        return tuple(each for each in self.contenders if each.is_planned)

    @property
    def estimated(self) -> tuple[Contender, ...]:
        """Candidates with an estimate alone, best first."""
        return tuple(each for each in self.contenders if each.seconds is not None and not each.is_planned)

    @property
    def excluded(self) -> tuple[Contender, ...]:
        """Candidates with neither."""
        return tuple(each for each in self.contenders if each.seconds is None)

    @property
    def front(self) -> tuple[Contender, ...]:
        """The Pareto front, the fastest first: candidates that no other one beats in both step and memory."""
        found: list[Contender] = []
        known = [each for each in self.contenders if each.seconds is not None and each.num_bytes is not None]
        for each in sorted(known, key=lambda each: (each.seconds, each.num_bytes)):
            if not found or (each.num_bytes or 0) < (found[-1].num_bytes or 0):
                found.append(each)
        return tuple(found)

    def with_contenders(self, *others: Contender) -> Comparison:
        """Return the comparison with more contenders, each in its place."""
        every = sorted((*self.contenders, *others), key=_place)
        return replace(self, contenders=tuple(every))

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as values of JSON; the hardware is that of the plan's mesh."""
        values = {"contenders": [_to_json(each) for each in self.contenders], "num_late": self.num_late}
        return values | ({"notes": list(self.notes)} if self.notes else {})


def _place(each: Contender) -> tuple[bool, bool, float]:
    return each.seconds is None, not each.is_planned, each.seconds or 0.0


_DEFAULTS = {each.name: each.default for each in fields(Contender) if each.name != "mesh"}


def _to_json(each: Contender) -> dict[str, Any]:
    """Return fields that differ from their defaults."""
    values = {name: value for name, value in asdict(each).items() if name != "mesh" and value != _DEFAULTS[name]}
    values["mesh"] = dict(each.mesh.axes)
    if each.same_on:
        values["same_on"] = [dict(mesh.axes) for mesh in each.same_on]
    return values


_AXES = Table(Whole(1, 10**9), least=1, most=MAX_AXES)
_SECONDS, _COUNT = Real(0), Whole(1)
COMPARISON = Record(
    {
        "contenders": ListOf(
            Record(
                {"mesh": _AXES},
                optional={
                    "microbatches": _COUNT,
                    "schedule": Text(),
                    "stages_per_rank": _COUNT,
                    "seconds": Maybe(_SECONDS),
                    "num_bytes": Maybe(Whole(0)),
                    "is_planned": Flag(),
                    "is_compared": Flag(),
                    "requested": Text(),
                    "estimate": Maybe(_SECONDS),
                    "excluded": OneOf(("", *EXCLUDED)),
                    "reason": Text(),
                    "gap": Maybe(_SECONDS),
                    "is_cut_short": Flag(),
                    "parameter_bytes": Whole(0),
                    "recomputed": Text(),
                    "splits": Text(),
                    "same_on": ListOf(_AXES),
                },
            )
        ),
        "num_late": Whole(0),
    },
    optional={"notes": ListOf(Text())},
)
"""The JSON of a comparison."""


def comparison_of(values: Mapping[str, Any] | None, hardware: str) -> Comparison | None:
    """Return the comparison of JSON that agrees with `COMPARISON`."""
    if values is None:
        return None

    def meshes(found: Sequence[Mapping[str, int]]) -> tuple[Mesh, ...]:
        return tuple(Mesh(axes, hardware) for axes in found)

    contenders = tuple(
        Contender(**{**each, "mesh": Mesh(each["mesh"], hardware), "same_on": meshes(each.get("same_on", ()))})
        for each in values["contenders"]
    )
    return Comparison(contenders, values["num_late"], tuple(values.get("notes", ())))
