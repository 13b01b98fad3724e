"""Comparison of two plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.console.units import format_bytes
from autopar.costs.plans.decision_rows import PlanRow
from autopar.costs.plans.difference import Amount, Change, Difference
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError
from autopar.ir.program.folding import folded


def difference(before: Plan, after: Plan) -> Difference:
    """Return the differences between two plans; whatever cannot be compared is among the mismatches.

    Raises InputError if `after` is the plan of a pipeline.
    """
    if not isinstance(after, Plan):
        raise InputError(f"a plan is compared with a Plan; found a {type(after).__name__}.")
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
    """Yield the choices that differ, without shared reshards, which are not calls of the model."""
    rows = {row.name: row for row in after.rows}
    found: list[tuple[str, tuple[str, str, str], tuple[PlanRow, PlanRow]]] = []
    for row in before.rows:
        other = rows.get(row.name)
        if other is None or row.kind == "shared_reshard" or not axes:
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


def _mismatches(before: Plan, after: Plan, axes: Sequence[str]) -> Iterable[str]:
    if (before.mesh.axes, before.mesh.names) != (after.mesh.axes, after.mesh.names):
        compared = f"choices are compared on {', '.join(axes)} alone" if axes else "choices are not compared"
        yield f"the mesh, {before.mesh} before and {after.mesh} after; {compared}"
    if before.mesh.hardware != after.mesh.hardware:
        yield f"the hardware, {before.mesh.hardware} before and {after.mesh.hardware} after"
    if before.memory_limit != after.memory_limit:
        yield f"the memory limit, {_limit(before)} before and {_limit(after)} after"
    if before.imbalance != after.imbalance:
        yield f"the imbalance of rows of experts, {before.imbalance:g} before and {after.imbalance:g} after"
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


def choice_words(plan: Plan, row: PlanRow, axes: Sequence[str] | None = None) -> str:
    """Describe a plan's choice for a decision: "dp=data, tp=column" for a call, "S(0) on dp" for a tensor."""
    names = plan.mesh.names
    shown = names if axes is None else axes
    if row.kind == "call":
        return ", ".join(f"{axis}={words}" for axis, words in zip(names, row.splits, strict=True) if axis in shown)
    saved = ", saved for the backward" if plan.is_saved(row.name) else ""
    return layout_words(row.layout, names, shown) + saved


def layout_words(layout: str, names: Sequence[str], shown: Sequence[str] | None = None) -> str:
    """Return a layout as people say it.

    >>> layout_words("S(0) R P", ("dp", "sp", "tp")), layout_words("I", ("dp",))
    ('dim 0 on dp, partial on tp', 'whole')
    """
    words = [
        f"{f'dim {placement[2:-1]}' if placement[0] in 'SZ' else 'partial'} on {axis}"
        for placement, axis in zip(layout.split(), names, strict=True)
        if placement not in ("I", "R") and (shown is None or axis in shown)
    ]
    return ", ".join(words) or "whole"
