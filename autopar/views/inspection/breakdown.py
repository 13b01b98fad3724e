"""Breakdown of a plan's seconds and bytes, summed over its rows, and differences between two plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.costs.plans.decision_rows import PlanRow
from autopar.costs.plans.difference import Share
from autopar.costs.plans.plan import Plan
from autopar.ir.program.folding import folded
from autopar.ir.program.recompute_segments import OFFLOAD

COMPUTE, RECOMPUTATION, OPTIMIZER, LOCAL = "compute", "recomputation", "optimizer", "local moves"
HOST_COPIES, LAUNCHES = "host copies", "launches"


def breakdown(plan: Plan) -> dict[str, Share]:
    """Return a step's parts: compute, recomputation, host copies, optimizer, collectives by axis ("all_reduce tp").

    The parts add up to the plan's seconds; launches are what hosts add (`Plan.host_seconds`). The rest of a row's
    seconds is its "local moves": the copies of reshards that send nothing.
    """
    seconds: dict[str, float] = defaultdict(float)
    num_bytes: dict[str, int] = defaultdict(int)
    for row in plan.rows:
        seconds[COMPUTE] += row.forward_seconds + row.backward_seconds
        copies = row.kind == "shared_reshard" or plan.recompute.get(row.segment) == OFFLOAD
        seconds[HOST_COPIES if copies else RECOMPUTATION] += row.recompute_seconds
        moving = sum(moved.seconds for moved in row.transfers)
        rest = row.seconds - row.forward_seconds - row.backward_seconds - row.recompute_seconds - moving
        seconds[OPTIMIZER if row.kind == "parameter" else LOCAL] += rest
        for moved in row.transfers:
            seconds[f"{moved.collective} {moved.axis}"] += moved.seconds
            num_bytes[f"{moved.collective} {moved.axis}"] += moved.num_bytes
    seconds[LAUNCHES] = plan.host_seconds
    return {name: Share(value, num_bytes[name]) for name, value in seconds.items() if value or num_bytes[name]}


def parting(before: Plan, after: Plan) -> dict[str, Share]:
    """Return how much more (below zero: less) `after` takes of each part than `before`, largest difference first."""
    one, other, nothing = breakdown(before), breakdown(after), Share()
    names = dict.fromkeys((*one, *other))
    deltas = {
        name: Share(
            other.get(name, nothing).seconds - one.get(name, nothing).seconds,
            other.get(name, nothing).num_bytes - one.get(name, nothing).num_bytes,
        )
        for name in names
    }
    order = sorted(deltas, key=lambda name: (-abs(deltas[name].seconds), -abs(deltas[name].num_bytes)))
    return {name: deltas[name] for name in order if deltas[name] != nothing}


def places(before: Plan, after: Plan, part: str) -> tuple[tuple[str, Share], ...]:
    """Locate the calls at which a collective on an axis ("all_reduce tp") takes more or less in `after`.

    Shares are relative to `before`: positive ones are more. Equal modules are folded, and the largest difference comes
    first.
    """
    others = {row.name: row for row in after.rows}
    found = []
    for row in before.rows:
        one, other = _share_of(row, part), _share_of(others[row.name], part) if row.name in others else Share()
        delta = Share(other.seconds - one.seconds, other.num_bytes - one.num_bytes)
        if delta != Share():
            kind = (
                "output of"
                if row.kind == "shared_reshard"
                else "the model's output"
                if row.kind == "output"
                else "into"
            )
            found.append((row.module, (kind, delta.num_bytes), delta))
    shares = []
    for fold in folded(found):
        kind, path = str(fold.kind[0]), ".".join(fold.path)  # type: ignore[index]  # the kinds made above
        shares.append((kind if kind == "the model's output" else f"{kind} {path or 'the model'}", _sum(fold.items)))
    return tuple(sorted(shares, key=lambda each: (-abs(each[1].seconds), -abs(each[1].num_bytes))))


def _share_of(row: PlanRow, part: str) -> Share:
    moved = [each for each in row.transfers if f"{each.collective} {each.axis}" == part]
    return Share(sum(each.seconds for each in moved), sum(each.num_bytes for each in moved))


def _sum(shares: Sequence[Share]) -> Share:
    return Share(sum(share.seconds for share in shares), sum(share.num_bytes for share in shares))
