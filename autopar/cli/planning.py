"""`autopar plan` and `autopar explain`: plans of models that are named, on meshes that need not be there."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Literal

import torch

from autopar.api import entry
from autopar.cli import groups
from autopar.cli.files import write_files
from autopar.cli.flags import in_shell_terms
from autopar.cli.meshes import parse_mesh, parse_recipe
from autopar.compiler.inference.offline import plan_generation
from autopar.console.names import AUTO, MODELS
from autopar.costs.hardware.load import load
from autopar.costs.plans.comparison import Contender
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.optimizer import Optimizer
from autopar.errors import AnnotationError, InfeasibleError, InputError, PipelineError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import LanguageModel
from autopar.models.named import named
from autopar.planning.mesh_estimates.compared import contender_of
from autopar.planning.options.groups import Experts, Memory, Pipeline, Search
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.views.report.table import plan_table

OF_ONE_PLAN = ("save", "html", "trace", "plan_cache")


def plan(options: argparse.Namespace) -> int:
    if options.decode is not None:
        print(_generation(options))
        _print_precision(options)
        return 0
    if options.within is not None:
        raise InputError("--within is when the first token of --decode has to come; give both, or leave it out.")
    recipes = recipes_of(options)
    plan = made(options)
    show_plan(plan.compared_with(*recipes) if recipes else plan, options)
    return 0


def show_plan(plan: Plan | PipelinePlan, options: argparse.Namespace) -> None:
    """Print a plan, and write it to the requested files."""
    print(plan_table(plan, verbose=options.verbose) if isinstance(plan, Plan) else plan)
    _print_precision(options)
    write_files((options.save, plan.save), (options.html, plan.to_html), (options.trace, plan.to_trace))


def recipes_of(options: argparse.Namespace) -> list[Contender]:
    """Return the recipes of --compare as they are planned, or why they have no plan."""
    found = [(text, *parse_recipe(text, options.hardware)) for text in options.compare]
    if found and (options.devices is None or options.mesh not in (None, AUTO)):
        raise InputError("--compare is compared with the best mesh of --devices; give these, and leave --mesh out.")
    for text, mesh, _ in found:
        if mesh.num_devices != options.devices:
            raise InputError(f"--compare '{text}' is of {mesh.num_devices} devices; give {options.devices}.")
    return [_planned_recipe(options, *each) for each in found]


def _planned_recipe(options: argparse.Namespace, text: str, mesh: Mesh, own: dict[str, Any]) -> Contender:
    try:
        return replace(contender_of(planned(argparse.Namespace(**{**vars(options), **own}), mesh)), requested=text)
    except (InfeasibleError, TimeLimitError, AnnotationError, PipelineError) as error:
        runs = {name: own[name] for name in ("microbatches", "schedule", "stages_per_rank") if name in own}
        kind = "memory" if isinstance(error, InfeasibleError) else "error"
        reason = in_shell_terms(str(error), vars(options))
        return Contender(mesh, **runs, requested=text, excluded=kind, reason=reason)


def _print_precision(options: argparse.Namespace) -> None:
    """Say in which precision a built-in model was planned, if nobody gave one."""
    chosen = precision_for(options)
    if chosen != options.precision:
        print(
            f"\nnote: {options.model} was planned in {chosen}, the default of built-in models on "
            f"{options.hardware}; --precision fp32 plans in float32"
        )


def precision_for(options: argparse.Namespace) -> str | None:
    """Return the given precision; by default of built-in models the usual one where bfloat16 is the faster dtype."""
    if options.precision is not None or options.bfloat16 or options.model not in MODELS:
        return options.precision
    flops = load(options.hardware).flops
    if flops.get("bfloat16", 0) <= flops.get("float32", 0):
        return None
    is_forward = options.inference or getattr(options, "decode", None) is not None
    return "bf16" if is_forward else "bf16-mixed"


def requested(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of any plan, training or not."""
    return {
        "hardware": options.hardware,
        "mode": options.mode,
        "strategy": options.strategy,
        "precision": precision_for(options),
        "optimizer": Optimizer(options.optimizer, options.master_copies),
        "microbatches": options.microbatches,
        "memory": groups.given(Memory, options),
        "pipeline": groups.given(Pipeline, options),
        "experts": groups.given(Experts, options),
        "search": groups.given(Search, options),
    }


def _generation(options: argparse.Namespace) -> object:
    for name in OF_ONE_PLAN:
        if getattr(options, name):
            raise InputError(
                f"--{name} with --decode, which makes two plans; save what autopar.plan_generation returns."
            )
    model, _ = named(options.model, options.batch, options.sequence, options.layers)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        return plan_generation(
            model.decoder if isinstance(model, LanguageModel) else model,
            mesh_of(options),
            batch=options.batch,
            prompt=options.sequence,
            tokens=options.decode,
            devices=options.devices,
            within=options.within,
            **requested(options),
        )


def explain(options: argparse.Namespace) -> int:
    plan = made(options)
    if not isinstance(plan, Plan):
        raise InputError(
            f"explain speaks of one plan, and on {plan.mesh} every stage has its own; plan without the axis "
            f"{plan.axis}, or ask plan.stages[0].plan.explain(…) in Python."
        )
    print(plan.explain(options.name))
    _print_precision(options)
    return 0


def made(options: argparse.Namespace) -> Plan | PipelinePlan:
    """Return the plan that the options ask for."""
    return planned(options, mesh_of(options), options.devices)


def mesh_of(options: argparse.Namespace) -> Mesh | Literal["auto"]:
    """Return the mesh that is given, or "auto" for a number of devices."""
    if options.mesh is None and options.devices is None:
        raise InputError(
            "neither --mesh nor --devices is given; give --devices 64 to find the best mesh of so many, or a mesh, "
            "as --mesh dp=8,tp=8."
        )
    return AUTO if options.mesh in (None, AUTO) else parse_mesh(options.mesh, options.hardware)


def planned(
    options: argparse.Namespace, mesh: Mesh | Literal["auto"], devices: int | None = None
) -> Plan | PipelinePlan:
    """Return the plan of the named model on a mesh."""
    model, example_inputs = named(options.model, options.batch, options.sequence, options.layers)
    wanted = {**requested(options), "devices": devices, "training": not options.inference}
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        return entry.plan(model, mesh, example_inputs, **wanted)
