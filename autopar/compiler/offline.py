"""`plan`: capture and plan without running, on a mesh, on every mesh of so many devices, or on one with a pipeline."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.compiler.arguments import (
    ExampleInputs,
    Run,
    check_in_one_piece,
    check_no_pipeline,
    check_not_deterministic,
)
from autopar.compiler.offline_planner import USUAL_AXES, USUAL_PIPELINE, OfflinePlanner
from autopar.compiler.options import check_planned_mesh
from autopar.compiler.plan_cache import PlanCache
from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, InputError, PipelineError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_estimates.compared import compared, of_estimate
from autopar.planning.mesh_estimates.estimates import Estimates, Subject
from autopar.planning.mesh_estimates.planned import Exact, Planned
from autopar.planning.mesh_search.arrangements import meshes_of
from autopar.planning.mesh_search.search import best_mesh, warn_of_best
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.request import pipeline_axis
from autopar.planning.pipeline.schedules.choice import RECOMMENDED
from autopar.planning.pipeline.schedules.schedule import UPDATING_OTHERWISE
from autopar.planning.request import PlanRequest
from autopar.planning.settings import context_of
from autopar.runtime.rewrite.per_rank_graph import rewrite
from autopar.runtime.step_graphs.kinds import bytes_of
from autopar.runtime.step_graphs.refusals import WITHOUT, reason_offline, reasons_in
from autopar.solver.deadline import after, interruptible, is_over, seconds_until, why_over

ESTIMATING = 0.4
"""Share of the time limit that estimating candidates may take, at most."""
WITHOUT_ANY = 0.7
"""The same as long as no candidate has an estimate."""
WORTH = 2
"""Times as many nodes as in its shorter form has a model whose arrangements are estimated, at least."""
WHOLE = "the whole model was captured for {} further batch sizes, as it does not run with fewer layers, or not alike"


def plan_offline(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    example_inputs: ExampleInputs,
    request: PlanRequest,
    devices: int | None,
    run: Run,
) -> Plan | PipelinePlan:
    """Return the best plan on the mesh; on "auto", on the best mesh of `devices`.

    Of `run` two options count. If steps are to be CUDA graphs, the plan counts the copies of inputs. Raises InputError
    if they must be and cannot, and PipelineError for a pipeline that is to draw as one device.
    """
    cuda_graph = run.cuda_graph
    check_planned_mesh(mesh, devices)
    # Meshes that are compared share their time, so that a plan of one is not what would be made of it alone.
    cache = PlanCache() if isinstance(mesh, str) else PlanCache.of(request.settings.search.cache)
    planner = OfflinePlanner(model, example_inputs, request, cache)
    abstract = None if isinstance(mesh, str) else Mesh.of(mesh)
    axis = request.pipeline.axis if abstract is None else pipeline_axis(abstract, request.pipeline.axis)
    graphs = cuda_graph is True or cuda_graph == "auto"
    if graphs:
        hardware = request.hardware_of(Mesh({"dp": 1}) if abstract is None else abstract)
        reason = reason_offline(hardware.is_host, request.training, request.pipeline.schedule)
        if reason is None:
            planner.request = replace(request, graph_input_bytes=bytes_of(planner.batch))
        elif cuda_graph is True:
            raise InputError(f"Run(cuda_graph=True) {reason}; {WITHOUT}")
    if axis is not None:
        check_not_deterministic(run)
    if isinstance(mesh, str):
        plan = _on_the_best(planner, mesh, devices)
    else:
        check_in_one_piece(request, axis)
        plan = planner.on(Mesh.of(mesh)) if axis is None else planner.in_stages(Mesh.of(mesh), axis)
    if isinstance(plan, PipelinePlan):
        check_not_deterministic(run)
    if cuda_graph is True:
        _check_graph(plan, run.deterministic)
    return plan


def _check_graph(plan: Plan | PipelinePlan, deterministic: bool) -> None:
    """Raise InputError if a step of the plan cannot be one CUDA graph."""
    stages = [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]
    for number, stage in enumerate(stages):
        context = context_of(stage)
        local = rewrite(context.space, context.choices, stage.recompute)
        for reason in reasons_in(context.space.program, stage, local.module.graph, deterministic):
            where = f" (in stage {number})" if len(stages) > 1 else ""
            raise InputError(f"Run(cuda_graph=True): the step {reason}{where}, or {WITHOUT}")


def _on_the_best(planner: OfflinePlanner, mesh: str, devices: int | None) -> Plan | PipelinePlan:
    """Return the best plan of all meshes; where a memory limit leaves none in one piece, that of the best pipeline."""
    request = planner.request
    meshes = meshes_of(mesh, devices, request.hardware, planner.most_axes(devices), request.pipeline.axis)
    if request.pipeline.axis is None:
        try:
            check_no_pipeline(request, meshes[0])
        except PipelineError as error:
            raise PipelineError(f'{error} With mesh="auto", give pipeline="pp".') from None
    time_limit = request.settings.search.time_limit
    with interruptible(), planner.allowance.searching():
        reason = not_estimated(planner)
        if not reason:
            found = _estimated(planner, mesh, devices)
            if found is not None:
                return found
            reason = "no candidate that was estimated has a plan"
        try:
            searched = best_mesh(planner.candidate, meshes, time_limit, planner.at_least, request.pipeline.axis)
        except InfeasibleError as error:
            every = meshes_of(
                mesh, devices, request.hardware, request.settings.search.max_axes or USUAL_AXES, USUAL_PIPELINE
            )
            longer = [each for each in every if USUAL_PIPELINE in each.axes]
            limit = planner.limit(longer[0]) if longer else None
            if (
                request.pipeline.axis is not None
                or not request.training
                or request.static_argnames
                or not longer
                or limit is None
                or planner.stored / longer[0].num_devices > limit
            ):
                raise
            staged = planner.in_pipelines()
            try:
                searched = best_mesh(staged.candidate, longer, time_limit, staged.at_least, USUAL_PIPELINE)
            except (InfeasibleError, TimeLimitError) as other:
                raise type(other)(f"{error}\nIn stages of a pipeline: {other}") from None
    note = f"planned on every mesh without estimates: {reason}"
    return replace(searched.best, comparison=replace(compared(searched), notes=(note,)))


def not_estimated(planner: OfflinePlanner) -> str:
    """Return why meshes are planned without estimates by a shorter form of the model; "" where they are estimated."""
    request = planner.request
    if not request.training:
        return "a forward is planned alone"
    if request.memory.offload != "none":
        return f"Memory(offload={request.memory.offload!r}) is given"
    if request.pipeline.schedule in UPDATING_OTHERWISE:
        return f"schedule {request.pipeline.schedule!r} updates parameters otherwise than once a step"
    least, whole = (len(each.program.graph.nodes) for each in (planner.base, planner.single))
    return "" if WORTH * least <= whole else "few or none of the model's layers repeat"


def _estimated(planner: OfflinePlanner, mesh: str, devices: int | None) -> Plan | PipelinePlan | None:
    """Return the best plan of the candidates that are likeliest by their estimates; None if none of them has a plan."""
    subject, exact = subject_of(planner, mesh, devices)
    _check_budget(planner, subject.meshes[0])
    deadline = after(planner.request.settings.search.time_limit)
    left = seconds_until(deadline)
    estimates = Estimates(subject, after(ESTIMATING * left), after(WITHOUT_ANY * left))
    estimates.search()
    planned = Planned(estimates, exact, deadline)
    searched = planned.best()
    if searched is None:
        _check_time(estimates, deadline)
        return None
    warn_of_best(searched)
    notes = (WHOLE.format(len(planner.whole)),) if planner.whole else ()
    return replace(searched.best, comparison=replace(planned.comparison(searched), notes=notes))


def _check_time(estimates: Estimates, deadline: float) -> None:
    """Raise TimeLimitError where no candidate has a plan because time is over."""
    likeliest = estimates.best()
    if likeliest and is_over(deadline):
        first = of_estimate(likeliest[0])
        raise TimeLimitError(
            f"{why_over()} before a plan was found; by estimates the best candidate is {first.recipe}, with a step "
            f"of about {format_seconds(likeliest[0].seconds)}. Give it longer, or plan that alone, on its mesh."
        )
    if not likeliest and estimates.is_over:
        raise TimeLimitError(
            f"{why_over()} before any of {len(estimates.subject.meshes)} meshes was estimated. Give it longer, or plan "
            "on a mesh of your own."
        )


def _check_budget(planner: OfflinePlanner, mesh: Mesh) -> None:
    """Raise InfeasibleError where all devices together have less memory than what is stored at least."""
    limit, stored = planner.limit(mesh), planner.stored
    each = math.ceil(stored / mesh.num_devices)
    if limit is None or each <= limit:
        return
    few = f"use at least {math.ceil(stored / limit)} devices, or " if limit > 0 else ""
    raise InfeasibleError(
        f"parameters and the optimizer's state are at least {format_bytes(stored)}, {format_bytes(each)} on each of "
        f"{mesh.num_devices} devices, and the memory limit leaves {format_bytes(max(limit, 0))} for tensors; "
        f"{few}raise it.",
        each,
    )


def subject_of(planner: OfflinePlanner, mesh: str, devices: int | None) -> tuple[Subject, Exact]:
    """Return the model to estimate, and the function that plans a candidate exactly.

    Under a memory limit pipelines are included by default; without one, the batch is not split unless one is requested.
    """
    request = planner.request
    limited = request.settings.limit is not None
    offers_pipelines = limited and not request.static_argnames and request.inputs == "whole"
    axis = request.pipeline.axis or (USUAL_PIPELINE if offers_pipelines else None)
    staged = planner if request.pipeline.axis is not None or axis is None else planner.in_pipelines()
    schedule = request.pipeline.schedule
    names = (schedule,) if schedule else tuple(n for n in RECOMMENDED if n != "gpipe")
    every = meshes_of(mesh, devices, request.hardware, planner.most_axes(devices), axis)
    longest = len(planner.blocks)
    meshes = tuple(each for each in every if axis not in each.axes or each.size(str(axis)) <= longest)
    subject = Subject(
        request=staged.request,
        meshes=meshes,
        axis=axis,
        schedules=names,
        samples=staged.samples,
        short=staged.short,
        limit=lambda each: math.inf if (most := staged.limit(each)) is None else most,
        at_least=functools.cache(staged.at_least),
        num_blocks=longest,
        keeps_batch=not limited,
    )
    return subject, staged.exact
