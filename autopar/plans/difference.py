"""What differs between two plans, from the plans alone: step, memory, traffic, and the choices.

Choices are compared decision by decision where both plans have one of that name, on the mesh axes that both have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from autopar.plans.plan import Plan, PlanRow
from autopar.program.folding import folded
from autopar.units import format_bytes, format_seconds

MAX_LINES = 40  # of the table of choices
WIDTH = 40  # of a choice in it
MAX_SHARE = 9.0  # above which a difference is called a multiple
TOLERANCE = 1e-9  # of a step: sums in another order may differ by so much


@dataclass(frozen=True, slots=True)
class Amount:
    """A number in two plans."""

    before: float
    after: float

    @property
    def delta(self) -> float:
        return self.after - self.before

    @property
    def is_equal(self) -> bool:
        return abs(self.delta) <= TOLERANCE * max(abs(self.before), abs(self.after))

    @property
    def share(self) -> float:
        """The difference as a share of what it was before; infinite where that was nothing."""
        return self.delta / self.before if self.before else float("inf") if self.after else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """Decisions of equal modules that two plans decide differently, in words."""

    module: str
    operation: str
    before: str
    after: str
    count: int
    seconds: Amount
    """What these decisions cost in a step, with the reshards of their inputs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What `Plan.diff` found, from the plan it was asked of (before) to the other one (after); `print` shows tables."""

    step: Amount
    bound: Amount
    memory: Amount
    traffic: Mapping[tuple[str, str], Amount]
    """(collective, axis) → bytes per device and step."""
    changes: tuple[Change, ...]
    mismatches: tuple[str, ...]
    """What is not the same in the two plans beside their choices: mesh, model, inputs, options."""
    axes: tuple[str, ...] = ()
    """The mesh axes that both have, on which choices are compared."""

    @property
    def is_empty(self) -> bool:
        amounts = (self.step, self.bound, self.memory, *self.traffic.values())
        return not self.changes and not self.mismatches and all(amount.is_equal for amount in amounts)

    def __str__(self) -> str:
        if self.is_empty:
            return "the plans are equal: same choices, same predictions"
        sections = [
            "\n".join(f"not the same: {text}" for text in self.mismatches),
            self._totals(),
            self._choices(),
        ]
        return "\n\n".join(section for section in sections if section)

    def _totals(self) -> str:
        table = [
            ["step", *_seconds_words(self.step)],
            ["bound", *_seconds_words(self.bound)],
            ["memory", *_bytes_words(self.memory)],
            *([f"{name} {axis}", *_bytes_words(amount)] for (name, axis), amount in self.traffic.items()),
        ]
        return tabulate(
            table,
            headers=["", "before", "after", "difference"],
            colalign=["left", *["right"] * 3],
            disable_numparse=True,
        )

    def _choices(self) -> str:
        if not self.changes:
            return "no choice differs" if self.axes else ""
        table = [
            [c.module or "(model)", c.operation, c.before, c.after, c.count, signed_seconds(c.seconds.delta)]
            for c in self.changes[:MAX_LINES]
        ]
        left = self.changes[MAX_LINES:]
        if left:
            delta = signed_seconds(sum(change.seconds.delta for change in left))
            table.append([f"({len(left)} more kinds)", "", "", "", sum(change.count for change in left), delta])
        headers = ["module", "operation", "before", "after", "calls", "time"]
        widths = [None, None, WIDTH, WIDTH, None, None]
        alignment = ["left"] * 4 + ["right"] * 2
        return tabulate(table, headers=headers, colalign=alignment, maxcolwidths=widths, disable_numparse=True)


def difference(before: Plan, after: Plan) -> Difference:
    """What differs from one plan to another; whatever cannot be compared is among the mismatches."""
    axes = [axis for axis in before.mesh.names if axis in after.mesh.axes]
    keys = sorted({*before.traffic, *after.traffic})
    return Difference(
        Amount(before.seconds, after.seconds),
        Amount(before.bound, after.bound),
        Amount(before.peak_bytes, after.peak_bytes),
        {key: Amount(before.traffic.get(key, 0), after.traffic.get(key, 0)) for key in keys},
        tuple(_changes(before, after, axes)),
        tuple(_mismatches(before, after, axes)),
        tuple(axes),
    )


def _changes(before: Plan, after: Plan, axes: Sequence[str]) -> Iterable[Change]:
    """The choices that differ; a hub is no choice of its own to a reader, and stands for no call."""
    rows = {row.name: row for row in after.rows}
    found: list[tuple[str, tuple[str, str, str], tuple[PlanRow, PlanRow]]] = []
    for row in before.rows:
        other = rows.get(row.name)
        if other is None or row.kind == "hub" or not axes:
            continue
        words = choice_words(before, row, axes), choice_words(after, other, axes)
        if words[0] != words[1]:
            operation = row.operation if row.kind == "call" else f"({row.kind})"
            found.append((row.module, (operation, *words), (row, other)))
    for fold in folded(found):
        operation, was, now = fold.kind  # type: ignore[misc]  # the kinds made above
        seconds = Amount(sum(one.seconds for one, _ in fold.items), sum(other.seconds for _, other in fold.items))
        yield Change(".".join(fold.path), operation, was, now, len(fold.items), seconds)
    again = [
        (segment, ("(recomputed)", before.recompute.get(segment, "none"), after.recompute.get(segment, "none")), None)
        for segment in dict.fromkeys((*before.recompute, *after.recompute))
    ]
    for fold in folded([each for each in again if each[1][1] != each[1][2]]):
        operation, was, now = fold.kind  # type: ignore[misc]
        yield Change(".".join(fold.path), operation, was, now, len(fold.items), Amount(0.0, 0.0))


def choice_words(plan: Plan, row: PlanRow, axes: Sequence[str] | None = None) -> str:
    """What a plan chose for a decision: "dp=data, tp=column" for a call, "S(0) on dp" for a tensor."""
    names = plan.mesh.names
    shown = names if axes is None else axes
    if row.kind == "call":
        return ", ".join(f"{axis}={role}" for axis, role in zip(names, row.roles, strict=True) if axis in shown)
    kept = ", kept for the backward" if plan.choices.get(row.name, "").endswith(" kept") else ""
    return layout_words(row.layout, names, shown) + kept


def layout_words(layout: str, names: Sequence[str], shown: Sequence[str] | None = None) -> str:
    """A layout as people say it.

    >>> layout_words("S(0) R P", ("dp", "sp", "tp")), layout_words("I", ("dp",))
    ('S(0) on dp, partial on tp', 'whole')
    """
    words = [
        f"{'partial' if placement == 'P' else placement} on {axis}"
        for placement, axis in zip(layout.split(), names, strict=True)
        if placement not in ("I", "R") and (shown is None or axis in shown)
    ]
    return ", ".join(words) or "whole"


def _mismatches(before: Plan, after: Plan, axes: Sequence[str]) -> Iterable[str]:
    if (before.mesh.axes, before.mesh.names) != (after.mesh.axes, after.mesh.names):
        compared = f"choices are compared on {', '.join(axes)} alone" if axes else "choices are not compared"
        yield f"the mesh, {before.mesh} before and {after.mesh} after; {compared}"
    if before.mesh.hardware != after.mesh.hardware:
        yield f"the hardware, {before.mesh.hardware} before and {after.mesh.hardware} after"
    if before.memory_limit != after.memory_limit:
        yield f"the memory limit, {_limit(before)} before and {_limit(after)} after"
    if before.fingerprint == after.fingerprint:
        return
    names = dict.fromkeys((*before.descriptions, *after.descriptions))
    alone = [sum(name not in plan.descriptions for name in names) for plan in (after, before)]
    shared = [name for name in names if name in before.descriptions and name in after.descriptions]
    other = [name for name in shared if before.descriptions[name] != after.descriptions[name]]
    yield (
        f"the model or its inputs: {alone[0]} decisions only in the plan before, {alone[1]} only in the plan after, "
        f"and of {len(shared)} in both {len(other)} are about another operation or shape"
        + (f", first {other[0]} ({before.descriptions[other[0]]}, {after.descriptions[other[0]]})" if other else "")
    )


def _limit(plan: Plan) -> str:
    return "none" if plan.memory_limit is None else format_bytes(plan.memory_limit)


def share_words(amount: Amount) -> str:
    """A relative difference: "+1.5%", or "25 times" where a percentage is no longer read."""
    return f"{amount.share:+.1%}" if amount.share < MAX_SHARE else f"{amount.after / amount.before:.3g} times"


def signed_seconds(seconds: float) -> str:
    """A difference of seconds: "+1.20 ms", "-3.0 µs", "0" where it is next to nothing."""
    if abs(seconds) < 5e-8:
        return "0"
    return f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"


def signed_bytes(count: float) -> str:
    """A difference of bytes: "+3.00 MB", "0"."""
    return f"{'+' if count > 0 else '-'}{format_bytes(abs(count))}" if count else "0"


def _seconds_words(amount: Amount) -> tuple[str, str, str]:
    share = f" ({share_words(amount)})" if amount.before and not amount.is_equal else ""
    return format_seconds(amount.before), format_seconds(amount.after), signed_seconds(amount.delta) + share


def _bytes_words(amount: Amount) -> tuple[str, str, str]:
    share = f" ({share_words(amount)})" if amount.before and amount.delta else ""
    return (
        format_bytes(amount.before) if amount.before else "-",
        format_bytes(amount.after) if amount.after else "-",
        signed_bytes(amount.delta) + share,
    )
