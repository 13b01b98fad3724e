"""What a plan comes to in the words of systems that do not run autopar, and what is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.plans.views import view


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """A `tp_plan` of Hugging Face: pattern of modules → style, for one mesh axis.

    `axis` is None where the plan splits no matrix. A module with the style "replicate" is whole: transformers adds a
    plan to the one that a model brings along.
    """

    axis: str | None
    styles: Mapping[str, str]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParallelizePlan:
    """What `parallelize_module` and `fully_shard` of torch take.

    `styles` has a ParallelStyle per module, for the mesh axis `axis` (None where the plan splits no matrix), and
    `shards` says of each module that `fully_shard` is called on whether its weights are freed after the forward, the
    root ("") last. `sharded` and `replicated` are the mesh axes on which samples differ: weights in parts, or whole.
    """

    axis: str | None
    styles: Mapping[str, Any]
    shards: Mapping[str, bool]
    sharded: tuple[str, ...]
    replicated: tuple[str, ...]
    lost: tuple[str, ...]

    def apply(self, model: Any, mesh: Any) -> Any:
        """Call both on a model and a DeviceMesh with the plan's axes; the model, changed in place."""
        return view("ParallelizePlan.apply")(self, model, mesh)


@dataclass(frozen=True, slots=True)
class TorchtitanArguments:
    """Command-line arguments of torchtitan, as "--parallelism.tensor_parallel_degree=8"."""

    arguments: tuple[str, ...]
    lost: tuple[str, ...]
