"""autopar: automatic parallelization of PyTorch models.

`autopar.compile(model, mesh)` captures a model once, chooses the layout of every operation by exact optimization,
rewrites the graph into one readable per-rank program with collectives, and trains it on torch.distributed.
"""

from autopar.annotations.annotate import annotate, annotate_plan, constrain
from autopar.api import compile, load, plan, plan_generation
from autopar.benchmarking.bench import bench
from autopar.cost.optimizer import Optimizer
from autopar.errors import (
    AnnotationError,
    AutoparError,
    CaptureError,
    InfeasibleError,
    InputError,
    LayoutError,
    MeshError,
    PeerError,
    PipelineError,
    PlanError,
    RuleError,
    StrategyError,
)
from autopar.lengths.buckets import Buckets
from autopar.pipeline.plan import PipelinePlan
from autopar.plans.plan import Plan
from autopar.program.operators.capacity import record_dropped_rows
from autopar.program.precision import Precision
from autopar.sharding.mesh import Mesh
from autopar.strategies.register import register_rule
from autopar.validation.check_rule import check_rule

__all__ = [
    "AnnotationError",
    "AutoparError",
    "Buckets",
    "CaptureError",
    "InfeasibleError",
    "InputError",
    "LayoutError",
    "Mesh",
    "MeshError",
    "Optimizer",
    "PeerError",
    "PipelineError",
    "PipelinePlan",
    "Plan",
    "PlanError",
    "Precision",
    "RuleError",
    "StrategyError",
    "annotate",
    "annotate_plan",
    "bench",
    "check_rule",
    "compile",
    "constrain",
    "load",
    "plan",
    "plan_generation",
    "record_dropped_rows",
    "register_rule",
]
