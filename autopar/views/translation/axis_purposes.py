"""Purpose of each axis of a plan, in one word: the factor that divides most of the work split on it.

"data" (samples), "tensor" (columns and rows of matrices), "sequence" (positions), "expert", or "nothing" if each of its
ranks computes everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from autopar.costs.plans.decision_rows import is_main
from autopar.costs.plans.plan import Plan
from autopar.errors import PlanError
from autopar.ir.program.paths import starred
from autopar.ir.sharding.layout import Layout

TENSOR, DATA, NOTHING = "tensor", "data", "nothing"
WORDS: Mapping[str, str] = {"column": TENSOR, "row": TENSOR, "replicated": NOTHING, "partial": NOTHING}


def purposes(plan: Plan) -> dict[str, str]:
    """Map each mesh axis to its purpose, by the seconds of the main calls; other factors keep their own names."""
    found = {}
    for position, axis in enumerate(plan.mesh.names):
        seconds: dict[str, float] = defaultdict(float)
        for row in plan.rows:
            if row.kind == "call" and is_main(row.operation):
                word = WORDS.get(row.roles[position], row.roles[position])
                seconds[word] += row.forward_seconds + row.backward_seconds
        seconds.pop(NOTHING, None)
        found[axis] = max(seconds, key=lambda word: seconds[word], default=NOTHING)
    return found


def tensor_axis(plan: Plan, axis: str | None) -> str | None:
    """Return the axis whose ranks share matrices: the requested one, or the only one; None if there is none.

    Raises PlanError for an axis that the mesh has not, or where there are several.
    """
    if axis is not None:
        if axis not in plan.mesh.names:
            raise PlanError(f"axis={axis!r}; the plan's mesh has {', '.join(plan.mesh.names)}.")
        return axis
    found = [name for name, purpose in purposes(plan).items() if purpose == TENSOR]
    if len(found) > 1:
        raise PlanError(
            f"the plan splits matrices on {' and '.join(found)}; such a plan is about one axis. Say which, as in "
            f"axis={found[0]!r}."
        )
    return found[0] if found else None


def stored_in_parts(plan: Plan) -> frozenset[str]:
    """Return the axes on which most parameters, counted in tensors, are stored in parts."""
    layouts = [Layout.parse(row.layout) for row in plan.rows if row.kind == "parameter"]
    split = (
        (axis, sum(layout[position].is_split for layout in layouts)) for position, axis in enumerate(plan.mesh.names)
    )
    return frozenset(axis for axis, count in split if 2 * count > len(layouts))


def unexpressed(plan: Plan, axis: str | None, expressed: Collection[str] = ()) -> tuple[str, ...]:
    """Return main calls that share their work on an axis in an unstated way, equal modules together."""
    if axis is None:
        return ()
    position = plan.mesh.names.index(axis)
    counts = Counter(
        (starred(row.module) or "the model", row.operation, row.roles[position])
        for row in plan.rows
        if row.kind == "call" and is_main(row.operation) and row.name not in expressed
    )
    return tuple(
        f"{module}: {operation} is divided by {role} on {axis} ({count}×), and computed whole there"
        for (module, operation, role), count in counts.items()
        if WORDS.get(role) != NOTHING
    )


def recomputed(plan: Plan) -> tuple[str, ...]:
    """Return one note per recompute mode on the segments recomputed in the backward, which a translation loses."""
    counts = Counter(mode for mode in plan.recompute.values() if mode != "none")
    return tuple(
        f"recompute: {count} of {len(plan.recompute)} layers in the mode {mode!r}" for mode, count in counts.items()
    )
