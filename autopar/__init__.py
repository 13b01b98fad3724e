"""autopar: automatic parallelization of PyTorch models.

`autopar.compile(model, mesh)` captures a model once, chooses the layout of every operation by exact optimization,
rewrites the graph into one readable per-rank program with collectives, and trains it on torch.distributed.

Each public name is imported on first use, so that `import autopar` costs nothing beyond Python itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AnnotationError,
    AutoparError,
    CaptureError,
    CutOffError,
    InfeasibleError,
    InputError,
    LayoutError,
    MeshError,
    PeerError,
    PipelineError,
    PlanError,
    RuleError,
    StrategyError,
    TimeLimitError,
)

if TYPE_CHECKING:
    from autopar.api.entry import compile, plan
    from autopar.api.loading import load
    from autopar.api.sizing import largest_batch, largest_sequence, least_devices
    from autopar.compiler.arguments import Run
    from autopar.compiler.inference.offline import plan_generation
    from autopar.costs.plans.plan import Plan
    from autopar.costs.pricing.conventions import MemoryConventions
    from autopar.costs.pricing.optimizer import Optimizer
    from autopar.ir.program.operators.capacity import record_dropped_rows
    from autopar.ir.program.precision import Precision
    from autopar.ir.sharding.mesh import Mesh
    from autopar.planning.annotations.annotate import annotate, annotate_plan, constrain
    from autopar.planning.options.groups import Capture, Experts, Memory, Pipeline, Search
    from autopar.planning.pipeline.plan import PipelinePlan
    from autopar.runtime.lengths.length_buckets import Buckets
    from autopar.strategies.register import register_rule
    from autopar.tools.benchmarking.bench import bench
    from autopar.tools.validation.check_rule import check_rule

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "autopar.planning.annotations.annotate": ("annotate", "annotate_plan", "constrain"),
    "autopar.api.entry": ("compile", "plan"),
    "autopar.tools.benchmarking.bench": ("bench",),
    "autopar.costs.pricing.conventions": ("MemoryConventions",),
    "autopar.costs.pricing.optimizer": ("Optimizer",),
    "autopar.compiler.inference.offline": ("plan_generation",),
    "autopar.runtime.lengths.length_buckets": ("Buckets",),
    "autopar.api.loading": ("load",),
    "autopar.compiler.arguments": ("Run",),
    "autopar.planning.options.groups": ("Capture", "Experts", "Memory", "Pipeline", "Search"),
    "autopar.planning.pipeline.plan": ("PipelinePlan",),
    "autopar.costs.plans.plan": ("Plan",),
    "autopar.ir.program.operators.capacity": ("record_dropped_rows",),
    "autopar.ir.program.precision": ("Precision",),
    "autopar.ir.sharding.mesh": ("Mesh",),
    "autopar.api.sizing": ("largest_batch", "largest_sequence", "least_devices"),
    "autopar.strategies.register": ("register_rule",),
    "autopar.tools.validation.check_rule": ("check_rule",),
}
"""Module → the public names that it defines: the imports above, at run time."""
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_PACKAGES = ("integrations", "models", "optim")
"""Packages that users reach as attributes, such as `autopar.optim.Muon`."""

__all__ = [
    "AnnotationError",
    "AutoparError",
    "Buckets",
    "Capture",
    "CaptureError",
    "CutOffError",
    "Experts",
    "InfeasibleError",
    "InputError",
    "LayoutError",
    "Memory",
    "MemoryConventions",
    "Mesh",
    "MeshError",
    "Optimizer",
    "PeerError",
    "Pipeline",
    "PipelineError",
    "PipelinePlan",
    "Plan",
    "PlanError",
    "Precision",
    "RuleError",
    "Run",
    "Search",
    "StrategyError",
    "TimeLimitError",
    "__version__",
    "annotate",
    "annotate_plan",
    "bench",
    "check_rule",
    "compile",
    "constrain",
    "largest_batch",
    "largest_sequence",
    "least_devices",
    "load",
    "plan",
    "plan_generation",
    "record_dropped_rows",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a package for users, on its first use (PEP 562)."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
