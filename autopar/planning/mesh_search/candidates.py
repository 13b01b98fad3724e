"""Candidates of `mesh="auto"`: plans without and with a pipeline, compared by the step of all their micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.costs.plans.plan import Plan
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.mesh_search.search import Candidate
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.simulated import simulated_seconds

PARAMETERS = "parameters"
NOT_SPLIT = ("", "-", "replicated", "partial")
SHOWN = 0.05
"""Share of the time of split calls below which a role of an axis is left out of the description."""


def of_plan(plan: Plan, count: int) -> Candidate[Plan | PipelinePlan]:
    """Return a plan whose step is of so many micro-batches, one after the other."""
    return Candidate(
        plan=plan,
        seconds=simulated_seconds(plan),
        gap=plan.gap,
        microbatches=count,
        stored_bytes=_stored(plan),
        again=_recompute_text(plan.recompute),
        axes=_axes_split([plan]),
    )


def of_pipeline(plan: PipelinePlan) -> Candidate[Plan | PipelinePlan]:
    """Return a plan of a pipeline; how far it is from the best is not known."""
    schedule = plan.schedule
    on_ranks = (schedule.stages_of(rank) for rank in range(schedule.num_ranks))
    every = {(stage.number, name): mode for stage in plan.stages for name, mode in stage.plan.recompute.items()}
    return Candidate(
        plan=plan,
        seconds=plan.seconds,
        gap=None,
        microbatches=schedule.num_microbatches,
        schedule=schedule.name,
        chunks=schedule.chunks,
        stored_bytes=max(sum(_stored(plan.stages[stage].plan) for stage in stages) for stages in on_ranks),
        again=_recompute_text(every),
        axes=_axes_split([stage.plan for stage in plan.stages]),
    )


def _axes_split(plans: Sequence[Plan]) -> str:
    """Describe what each axis splits for most of its calls' time: data, sequence, column, row, expert, etc."""
    found = []
    for number, name in enumerate(plans[0].mesh.names):
        seconds: defaultdict[str, float] = defaultdict(float)
        for row in (row for plan in plans for row in plan.rows if row.kind == "call"):
            seconds[row.roles[number]] += row.forward_seconds + row.backward_seconds
        split = {role: each for role, each in seconds.items() if role not in NOT_SPLIT}
        roles = [
            role for role in sorted(split, key=lambda role: -split[role]) if split[role] > SHOWN * sum(split.values())
        ]
        found.append(f"{name}: {', '.join(roles) or 'nothing'}")
    return "; ".join(found)


def _stored(plan: Plan) -> int:
    return plan.memory.parts.get(PARAMETERS, 0) if plan.memory else 0


def _recompute_text(recompute: Mapping[Any, str]) -> str:
    """Describe how many segments are recomputed, by mode."""
    modes = Counter(recompute.values())
    found = [f"{mode} in {modes[mode]} of {len(recompute)}" for mode in MODES[1:] if modes[mode]]
    return ", ".join(found)


def saying(plan: Plan, count: int) -> Plan:
    """Return the plan with the options to request it: with one micro-batch, their number is left out."""
    note = f"the batch fits in {count} micro-batches: give microbatches={count}, and train with model.train_step"
    return replace(plan, notes=(*plan.notes, note))
