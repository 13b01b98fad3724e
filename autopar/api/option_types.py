"""The options of `compile` and `plan` by their types, for the overloads that say what each call returns.

A type checker cannot see the axes of a mesh. It takes a call that names its pipeline (`pipeline="pp"`) to return a
PipelineModule or a PipelinePlan, and any other call to return those of a model without a pipeline. On a mesh with an
axis "pp", name it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, Required, TypedDict

from autopar.capture.tiles.mlp import MlpTiles
from autopar.capture.tiles.tiled_losses import LossTiles
from autopar.compiler.arguments import Prefetch, Recompute, Solver
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.space.returned import Outputs
from autopar.ir.program.precision import Precision
from autopar.planning.annotations.pins import Mode
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.request import Inputs, Offloaded
from autopar.runtime.lengths.length_buckets import Buckets


class Options(TypedDict, total=False):
    """The options of `compile` and `plan` alike, but for `pipeline` and `training`."""

    mode: Mode
    strategy: str | None
    memory: str | int | None
    recompute: Recompute
    optimizer: str | Optimizer
    master_copies: bool
    inputs: Inputs
    outputs: Outputs
    hardware: str | Hardware | None
    solver: Solver
    time_limit: float
    gap: float | None
    microbatches: int | None
    schedule: str | None
    chunks: int | None
    stages: Sequence[str] | None
    assume: Sequence[str] | None
    static_argnames: Sequence[str] | None
    capacity_factor: float | None
    loss_tiles: LossTiles
    mlp_tiles: MlpTiles
    weight_tiles: bool
    imbalance: float
    precision: str | Precision | None
    prefetch: Prefetch
    offload: Offloaded
    host_memory: str | int | None
    memory_conventions: str | MemoryConventions
    plan_cache: str | os.PathLike[str] | None


class PlanOptions(Options, total=False):
    """The options of `plan` on a mesh without a pipeline."""

    devices: int | None
    max_axes: int | None
    pipeline: None
    training: bool


class PipelinePlanOptions(Options, total=False):
    """The options of `plan` on a mesh with a pipeline."""

    devices: int | None
    max_axes: int | None
    pipeline: Required[str]
    training: bool


class MeshSearchOptions(Options, total=False):
    """The options of `plan` with mesh="auto"."""

    devices: Required[int | None]
    max_axes: int | None
    pipeline: str | None
    training: bool


class CompileOptions(Options, total=False):
    """The options that `compile` alone has."""

    plan: Plan | PipelinePlan | None
    deterministic: bool
    seed: int | None
    check_inputs: bool | None
    buckets: Buckets | Literal["auto"] | None


class TrainingOptions(CompileOptions, total=False):
    """The options of `compile` on a mesh without a pipeline."""

    pipeline: None
    training: Literal[True]


class ForwardOptions(CompileOptions, total=False):
    """The options of `compile` for the forward alone."""

    pipeline: None
    training: Required[Literal[False]]


class PipelineOptions(CompileOptions, total=False):
    """The options of `compile` on a mesh with a pipeline."""

    pipeline: Required[str]
    training: Literal[True]
