"""A plan that was loaded, brought together with its model again: captured and laid out as it was, and not solved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.capture.export import skeleton_of
from autopar.capture.static.arguments import with_static
from autopar.compiler.arguments import ExampleInputs, example_arguments, plan_request
from autopar.compiler.tiles import tiles_of
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.optimizer import Optimizer
from autopar.errors import PlanError
from autopar.planning.annotations.pins import pins_of
from autopar.planning.formulation import Formulation
from autopar.planning.options.groups import Experts, Memory
from autopar.planning.record import choices_of
from autopar.planning.request import axes_of_parts
from autopar.planning.settings import PlanContext
from autopar.runtime.module.batches import split_batch
from autopar.runtime.module.inputs import call_signature, canonical_arguments
from autopar.runtime.module.local_batch import layouts_of_parts, whole_batch


def attach(plan: Plan, model: nn.Module, example_inputs: ExampleInputs, **options: Any) -> Plan:
    """Return the same plan with the context that `explain`, `what_if` and `verify` need; options as `autopar.plan` had
    them.

    Raises PlanError with the difference where the plan belongs to another model or other inputs.
    """
    optimizer = options.get("optimizer")
    if isinstance(optimizer, Optimizer) and not plan.offloads_optimizer:  # "auto" may leave it on the device
        options = {**options, "optimizer": replace(optimizer, gradients="device")}
    memory = Memory.of(options.get("memory")).limited(plan.memory_limit).offloading(plan.offload)
    experts = Experts.of(options.get("experts"))
    if experts.padded is None:
        experts = replace(experts, imbalance=plan.imbalance)
    request = plan_request(model, **{**options, "memory": memory, "experts": experts}).running(plan.implementations)
    request = replace(request, settings=replace(request.settings, reserved=plan.reserved))
    given = canonical_arguments(call_signature(model), *example_arguments(example_inputs))
    batch = with_static(given, request.static_argnames, model.forward)
    axes = axes_of_parts(request.inputs, plan.mesh)
    part = split_batch(batch, request.microbatches or 1)[0]
    args, kwargs = whole_batch(part, math.prod(map(plan.mesh.size, axes)))

    skeleton = skeleton_of(model, request.precision, request.training)
    traced = request.traced(skeleton, args, kwargs, training=model.training and request.training)
    requested = request.tiles
    program = traced.program(requested)
    tiles = tiles_of(plan, program, requested, plan.mesh)
    program = program if tiles == requested else traced.program(tiles)
    arriving = layouts_of_parts(program, part, plan.mesh, axes)
    space = request.space(program, plan.mesh, arriving, zigzag_axes=plan.zigzag_axes)
    space = space.waiting_for(plan.waits) if plan.waits else space
    choices = choices_of(plan, space)
    specified = request.annotations_about(space.program, plan.mesh)
    pins = pins_of(specified, space, request.mode, {})
    lasting = request.conventions.main_gradients
    runs = Microbatches(request.microbatches or 1, reduce_each=plan.reduce_each, main_gradients=lasting)
    memory = MemoryModel(space, runs, plan.prefetch, offloads=request.searched.offloads)
    segments = None if not plan.recompute else dict.fromkeys(memory.lifetimes.segments, "")
    if segments is not None and plan.recompute.keys() != segments.keys():
        raise PlanError(
            f"the plan computes the layers {', '.join(plan.recompute)} again, this model has {', '.join(segments)}; "
            "attach the model that the plan was made for."
        )
    # The memory rows of the search are not saved: prove the bound without the limit.
    problem = Formulation(space, memory).problem(pins, modes=segments)
    settings, hosts = request.searched, plan.host_seconds
    context = PlanContext(space, memory, pins, choices, problem, settings, specified, request.mode, host_seconds=hosts)
    return replace(plan, mesh=space.mesh, context=context)
