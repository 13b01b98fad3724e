"""Plans of the smallest model on any mesh, and candidates of a search for the best one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autopar.capture.export import capture
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.space.build import build_space
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotate, annotations_of, pins_of
from autopar.planning.mesh_estimates.compared import compared
from autopar.planning.mesh_search.arrangements import meshes_of
from autopar.planning.mesh_search.search import Candidate, Searched
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.planner import make_plan
from autopar.views.report.comparison_table import comparison_text
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import X_BD, TwoLinears


def maker(hardware: Hardware = SLOW_DEVICES, annotated: bool = False) -> Callable[[Mesh], Plan]:
    """Plans of the smallest model on any mesh."""
    model = TwoLinears()
    if annotated:
        annotate(model, "up", tp="column")
    program = capture(model, (X_BD,), {})

    def make(mesh: Mesh) -> Plan:
        space = build_space(program, mesh, hardware)
        return make_plan(space, pins_of(annotations_of(model), space, "auto", {}))[0]

    return make


def candidate(plan: Plan, seconds: float | None = None) -> Candidate[Plan]:
    return Candidate(plan, plan.seconds if seconds is None else seconds, plan.gap)


@functools.cache
def any_plan(mesh: Mesh) -> Plan:
    return maker()(mesh)


def plans_of(*seconds_and_bytes: tuple[float, int]) -> dict[Mesh, Plan]:
    """Meshes of 8 devices, in the order in which they are tried, with plans that take so much."""
    meshes = meshes_of("auto", 8, SLOW_DEVICES, 3)
    plan = any_plan(meshes[0])
    return {
        mesh: replace(plan, mesh=mesh, seconds=seconds, bound=seconds, peak_bytes=num_bytes)
        for mesh, (seconds, num_bytes) in zip(meshes, seconds_and_bytes, strict=False)
    }


def table(found: Searched[Any]) -> str:
    """The candidates of a search as text."""
    return "\n\n".join(comparison_text(compared(found)))


def compared_text(plan: Plan | PipelinePlan) -> str:
    """The candidates of a plan as text."""
    assert plan.comparison is not None, "of a mesh that was given"
    return "\n\n".join(comparison_text(plan.comparison))
