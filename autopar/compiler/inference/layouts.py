"""Choice of the cache's layout: the one with the fastest plan of a token, among all layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autopar.capture.export import freeze
from autopar.compiler.garbage_collection import uncollected
from autopar.compiler.inference.session import arguments_of
from autopar.compiler.inference.state import CacheSizes, described, specified_layout
from autopar.console.units import format_bytes
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.best_plan import best_plan
from autopar.planning.request import PlanRequest
from autopar.runtime.module.inputs import call_signature


@dataclass(frozen=True, slots=True)
class Laid:
    """A plan, and the layout in which the cache lies with it."""

    plan: Plan
    layout: Layout


@uncollected()
def program_of(model: nn.Module, request: PlanRequest, sizes: CacheSizes, num_tokens: int) -> Program:
    """Return the program of so many tokens a sample, with a cache; `model` is a skeleton whose class takes one."""
    ids = torch.empty((sizes.batch, num_tokens), dtype=torch.int64)
    positions = torch.empty(sizes.batch, dtype=torch.int64)
    position_ids = positions.unsqueeze(-1) if num_tokens == 1 else None
    freeze(model, frozenset(dict(model.named_parameters())))
    arguments = arguments_of(call_signature(model), ids, sizes.whole(), sizes.whole(), positions, position_ids)
    return request.traced(model, *arguments, training=False).program(request.tiles)


def caches_of(program: Program, sizes: CacheSizes) -> list[str]:
    """Return the placeholders of keys and values that a program takes."""
    shapes = set(sizes.shapes)
    infos = zip(program.inputs, program.input_values, strict=True)
    return [name for name, info in infos if name is not None and getattr(info, "shape", None) in shapes]


def best_laid(
    program: Program, request: PlanRequest, mesh: Mesh, sizes: CacheSizes, storage: Mapping[str, Layout] | None = None
) -> Laid:
    """Return the fastest plan of a token; a preset says the layout of the cache, else all are compared.

    Raises what planning raises, where no layout has a plan.
    """
    known = specified_layout(program, request.annotations_about(program, mesh), mesh)
    limit = request.settings.tensor_limit
    best: Laid | None = None
    refused: InfeasibleError | None = None
    """Error of the layout that comes nearest to the memory limit."""
    for layout in sizes.layouts(mesh) if known is None else (known,):
        num_bytes = sizes.num_bytes(layout, mesh.sizes)
        try:
            with request.settings.explaining():
                if limit is not None and num_bytes > limit:
                    raise InfeasibleError(
                        f"the cache alone takes {format_bytes(num_bytes)} per device, {described(layout, mesh)}, and "
                        f"memory is {format_bytes(limit)}; give more memory, or serve fewer or shorter texts at once.",
                        num_bytes,
                    )
                found = laid(program, request, mesh, sizes, layout, storage)
        except InfeasibleError as error:
            if refused is None or (error.least_bytes or math.inf) < (refused.least_bytes or math.inf):
                refused = error
            continue
        if best is None or found.plan.step_seconds < best.plan.step_seconds:
            best = found
    if best is None:
        assert refused is not None, "a cache that is whole everywhere is one of the layouts"
        raise refused
    return best


def laid(
    program: Program,
    request: PlanRequest,
    mesh: Mesh,
    sizes: CacheSizes,
    layout: Layout,
    storage: Mapping[str, Layout] | None = None,
) -> Laid:
    """Return the best plan of a program whose cache lies so."""
    space = request.space(program, mesh, dict.fromkeys(caches_of(program, sizes), layout))
    return Laid(best_plan(request, space, storage), layout)
