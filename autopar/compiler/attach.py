"""A plan that was loaded, brought together with its model again: captured and laid out as it was, and not solved."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from autopar.annotations.annotate import annotations_of, pins_of
from autopar.api import example_arguments, profile_of
from autopar.capture.export import capture, skeleton
from autopar.cost.optimizer import Optimizer
from autopar.errors import PlanError
from autopar.hardware.profile import Hardware
from autopar.memory.model import MemoryModel
from autopar.planning.formulation import Statement
from autopar.planning.planner import PlanContext, Settings, choices_of
from autopar.plans.plan import Plan
from autopar.runtime.module.inputs import canonical_arguments
from autopar.space.build import build_space

if TYPE_CHECKING:
    from autopar.annotations.pins import Mode


def attach(
    plan: Plan,
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    mode: Mode = "auto",
    recompute: str = "auto",
    optimizer: str = "adamw",
    master_copies: bool = False,
    outputs: str = "dtensor",
    hardware: str | Hardware | None = None,
    solver: str = "auto",
) -> Plan:
    """The same plan with the context that `explain`, `what_if` and `verify` need; options as `autopar.plan` had them.

    Raises PlanError with the difference where the plan belongs to another model or other inputs.
    """
    args, kwargs = canonical_arguments(inspect.signature(model.forward), *example_arguments(example_inputs))
    program = capture(skeleton(model), args, kwargs, training=model.training)
    profile = profile_of(hardware, plan.mesh)
    space = build_space(program, plan.mesh, profile, outputs == "full", optimizer=Optimizer(optimizer, master_copies))
    choices = choices_of(plan, space)
    annotations = annotations_of(model)
    pins = pins_of(annotations, space, mode, {})
    memory = MemoryModel(space)
    segments = None if not plan.recompute else dict.fromkeys(memory.segments, "")
    if segments is not None and plan.recompute.keys() != segments.keys():
        raise PlanError(
            f"the plan computes the layers {', '.join(plan.recompute)} again, this model has {', '.join(segments)}; "
            "attach the model that the plan was made for."
        )
    # At which moments of a step memory was short is not saved: the bound is proven on the problem without its limit.
    problem = Statement(space, memory).problem(pins, modes=segments)
    settings = Settings(plan.memory_limit, recompute, solver)
    return replace(plan, context=PlanContext(space, memory, pins, choices, problem, settings, annotations, mode))
