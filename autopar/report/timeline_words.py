"""A plan's timeline in words: what its seconds are, and where they differ from the sum that the solver makes least."""

from __future__ import annotations

from autopar.inspection.timeline import beside_the_sum
from autopar.plans.plan import Plan
from autopar.units import format_seconds

SMALL = 0.005  # of a step: what is less is not told
MOST = 4
"""Differences that are told."""


def timeline_words(plan: Plan) -> tuple[str, str]:
    """The step, and its largest differences from the sum, "" where they are small; PlanError for a loaded plan."""
    found = plan.timeline()
    hidden = f"; {format_seconds(found.hidden)} of collectives hidden" if found.hidden > SMALL * found.seconds else ""
    apart = [
        f"{name} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for name, seconds in beside_the_sum(plan, found).items()
        if abs(seconds) > SMALL * found.seconds
    ]
    parts = f"computing {format_seconds(found.computing)}, waiting {format_seconds(found.waiting)}"
    return f"{format_seconds(found.seconds)} simulated: {parts}{hidden}", ", ".join(apart[:MOST])
