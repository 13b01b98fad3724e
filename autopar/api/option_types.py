"""Options of `compile` and `plan` by their types, for the overloads that say what each call returns.

A type checker cannot see the axes of a mesh. It takes a call that names its pipeline (`pipeline="pp"`, or a `Pipeline`)
to return a PipelineModule or a PipelinePlan, and any other call to return those of a model in one piece. On a mesh with
an axis "pp", name it.
"""

from __future__ import annotations

from typing import Literal, Required, TypedDict

from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.space.returned import Outputs
from autopar.ir.program.precision import Precision
from autopar.planning.annotations.pins import Mode
from autopar.planning.options.groups import Capture, Experts, Memory, Pipeline, Search
from autopar.planning.request import Inputs


class Options(TypedDict, total=False):
    """Options of `compile`, `plan` and `load`, without `pipeline` and `training`."""

    mode: Mode
    strategy: str | None
    memory: Memory | str | int | None
    precision: str | Precision | None
    optimizer: str | Optimizer
    hardware: str | Hardware | None
    inputs: Inputs
    outputs: Outputs
    microbatches: int | None
    experts: Experts | None
    search: Search | None
    capture: Capture | None


class InOnePiece(Options, total=False):
    """Options on a mesh without a pipeline."""

    pipeline: None
    training: bool


class Training(Options, total=False):
    """Options of a compiled module that trains, on a mesh without a pipeline."""

    pipeline: None
    training: Literal[True]


class Forward(Options, total=False):
    """Options of a compiled module for the forward alone."""

    pipeline: None
    training: Required[Literal[False]]


class InStages(Options, total=False):
    """Options on a mesh with a pipeline."""

    pipeline: Required[Pipeline | str]
    training: Literal[True]


class OnAnyMesh(Options, total=False):
    """Options on a mesh that is searched for."""

    pipeline: Pipeline | str | None
    training: bool
