"""Candidates of a search of meshes as values, for the table, the page and the file of its best plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from autopar.costs.plans.comparison import Comparison, Contender, Excluded
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_estimates.estimates import Estimate
from autopar.planning.mesh_search.candidates import of_pipeline, of_plan
from autopar.planning.mesh_search.search import EQUAL_BYTES, Candidate, Searched, Tried
from autopar.planning.pipeline.plan import PipelinePlan

SAME_SECONDS = 2e-3
"""Relative: estimates of plans that split the same tensors over other axes differ by less."""
P = TypeVar("P", Plan, PipelinePlan)


def compared(searched: Searched[Any], estimates: Mapping[Mesh, float] | None = None) -> Comparison:
    """Return the meshes of a search; `estimates` are the seconds by which planned ones were chosen."""
    known = estimates or {}
    planned = [
        replace(
            _of_tried(line[0]),
            estimate=known.get(line[0].mesh),
            same_on=tuple(each.mesh for each in line[1:]),
        )
        for line in searched.lines
    ]
    left = [Contender(each.mesh, excluded=each.excluded, reason=each.reason) for each in searched.without]
    return Comparison((*planned, *left))


def of_estimate(estimate: Estimate, excluded: Excluded = "", reason: str = "") -> Contender:
    """Return an estimated candidate; if it is excluded as planning has shown, without a step and memory."""
    schedule, is_out = estimate.schedule, excluded not in ("", "time")
    return Contender(
        mesh=estimate.mesh,
        microbatches=estimate.microbatches,
        schedule="" if schedule is None else schedule.name,
        stages_per_rank=1 if schedule is None else schedule.chunks,
        seconds=None if is_out else estimate.seconds,
        num_bytes=None if is_out else round(estimate.num_bytes),
        estimate=estimate.seconds,
        excluded=excluded,
        reason=reason,
    )


def are_same(one: Estimate, other: Estimate) -> bool:
    """Return whether two estimates are of the same plan, over other axes."""
    equal = math.isclose(one.seconds, other.seconds, rel_tol=SAME_SECONDS)
    equal = equal and math.isclose(one.num_bytes, other.num_bytes, rel_tol=EQUAL_BYTES)
    return equal and (one.microbatches, one.schedule) == (other.microbatches, other.schedule)


def distinct(estimates: Iterable[Estimate]) -> list[Contender]:
    """Return estimates, best first, the same ones under the mesh of the fewest axes."""
    groups: list[list[Estimate]] = []
    for each in sorted(estimates, key=lambda each: each.seconds):
        group = next((group for group in groups if are_same(group[0], each)), None)
        if group is None:
            groups.append([each])
        else:
            group.append(each)
    found = []
    for group in groups:
        first, *others = sorted(group, key=lambda each: each.mesh.ndim)
        found.append(replace(of_estimate(first), same_on=tuple(each.mesh for each in others)))
    return found


def compared_with(plan: P, others: Sequence[Plan | PipelinePlan | Contender]) -> P:
    """Return the plan with others next to its candidates; one that is among these already stays a single line."""
    before = plan.comparison or Comparison((contender_of(plan),))
    known = {(each.mesh, each.runs, each.seconds, each.num_bytes) for each in before.planned}
    found = [each if isinstance(each, Contender) else contender_of(each) for each in others]
    found = [each for each in found if (each.mesh, each.runs, each.seconds, each.num_bytes) not in known]
    return replace(plan, comparison=before.with_contenders(*(replace(each, is_compared=True) for each in found)))


def contender_of(plan: Plan | PipelinePlan) -> Contender:
    """Return a plan as it stands among candidates."""
    if isinstance(plan, PipelinePlan):
        return _of_candidate(of_pipeline(plan))
    if plan.workload is None:
        return _of_candidate(of_plan(plan, 1))
    return replace(_of_candidate(of_plan(plan, plan.workload.microbatches)), seconds=plan.workload.seconds)


def _of_tried(tried: Tried[Any]) -> Contender:
    assert tried.found is not None
    return replace(_of_candidate(tried.found), is_cut_short=tried.is_cut_short)


def _of_candidate(candidate: Candidate[Any]) -> Contender:
    return Contender(
        mesh=candidate.plan.mesh,
        microbatches=candidate.microbatches,
        schedule=candidate.schedule,
        stages_per_rank=candidate.chunks,
        seconds=candidate.seconds,
        num_bytes=candidate.plan.peak_bytes,
        is_planned=True,
        gap=candidate.gap,
        parameter_bytes=candidate.stored_bytes,
        recomputed=candidate.again,
        splits=candidate.axes,
    )
