"""`autopar plan` and `autopar explain`: plans of models that are named, on meshes that need not be there."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from autopar import api
from autopar.cli.files import write_files
from autopar.cli.meshes import DEFAULT_AXES, parse_mesh
from autopar.errors import InputError
from autopar.hardware.load import load
from autopar.inference.offline import plan_generation
from autopar.models.catalogue import LanguageModel
from autopar.models.named import named
from autopar.names import AUTO, MODELS
from autopar.pipeline.plan import PipelinePlan
from autopar.plans.plan import Plan
from autopar.report.table import plan_table

OF_ONE_PLAN = ("save", "html", "trace", "plan_cache")


def plan(options: argparse.Namespace) -> int:
    if options.decode is not None:
        print(_generation(options))
        _print_precision(options)
        return 0
    if options.within is not None:
        raise InputError("--within is when the first token of --decode has to come; give both, or leave it out.")
    plan = made(options)
    print(plan_table(plan, verbose=options.verbose) if isinstance(plan, Plan) else plan)
    _print_precision(options)
    write_files((options.save, plan.save), (options.html, plan.to_html), (options.trace, plan.to_trace))
    return 0


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


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Options of any plan, training or not."""
    return {
        "hardware": options.hardware,
        "mode": options.mode,
        "strategy": options.strategy,
        "memory": options.memory,
        "memory_conventions": options.memory_conventions,
        "recompute": options.recompute,
        "optimizer": options.optimizer,
        "master_copies": options.master_copies,
        "offload": options.offload,
        "host_memory": options.host_memory,
        "solver": options.solver,
        "time_limit": options.time_limit,
        "pipeline": options.pipeline,
        "schedule": options.schedule,
        "microbatches": options.microbatches,
        "chunks": options.chunks,
        "capacity_factor": options.capacity_factor,
        "loss_tiles": options.loss_tiles,
        "mlp_tiles": options.mlp_tiles or None,
        "weight_tiles": options.weight_tiles,
        "imbalance": options.imbalance,
        "precision": precision_for(options),
        "prefetch": options.prefetch,
    }


def _generation(options: argparse.Namespace) -> object:
    """The plan of generation that the options ask for."""
    for name in OF_ONE_PLAN:
        if getattr(options, name):
            raise InputError(
                f"--{name} beside --decode, which makes two plans; save what autopar.plan_generation returns."
            )
    model, _ = named(options.model, options.batch, options.sequence, options.layers)
    auto = options.mesh == AUTO
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        return plan_generation(
            model.decoder if isinstance(model, LanguageModel) else model,
            AUTO if auto else parse_mesh(options.mesh, options.hardware),
            batch=options.batch,
            prompt=options.sequence,
            tokens=options.decode,
            devices=options.devices,
            max_axes=options.max_axes or len(DEFAULT_AXES),
            within=options.within,
            **_asked(options),
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
    """The plan that the options ask for."""
    model, example_inputs = named(options.model, options.batch, options.sequence, options.layers)
    auto = options.mesh == AUTO
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        return api.plan(
            model,
            AUTO if auto else parse_mesh(options.mesh, options.hardware),
            example_inputs,
            devices=options.devices,
            max_axes=options.max_axes,
            **_asked(options),
            plan_cache=options.plan_cache,
            training=not options.inference,
        )
