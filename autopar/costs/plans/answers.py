"""Answers of a plan's methods: `reprice`, `verify`, and its translations for systems that do not run autopar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.views import view


@dataclass(frozen=True, slots=True)
class Repriced:
    """Cost of a plan at other sizes, with the same choices. `print` shows a table."""

    symbols: Mapping[str, int]
    seconds: float
    flops: float
    """Floating point operations per device and step."""
    traffic: Mapping[tuple[str, str], int]
    """(collective, axis) → bytes per device and step."""
    memory: Mapping[str, int]
    """"memory" (at the moment that was the fullest), "memory/activations", "parameter_bytes", … → bytes per device."""

    def __str__(self) -> str:
        rows = [("seconds", format_seconds(self.seconds)), ("FLOPs", f"{self.flops:.3g}")]
        rows += [(f"{name} over {axis}", format_bytes(count)) for (name, axis), count in self.traffic.items()]
        rows += [(name.removesuffix("_bytes"), format_bytes(count)) for name, count in self.memory.items()]
        at = ", ".join(f"{name}={value}" for name, value in self.symbols.items())
        return f"at {at}\n{tabulate(rows, tablefmt='plain', disable_numparse=True)}"


@dataclass(frozen=True, slots=True)
class Verification:
    """Figures that were computed again; `problems` are the claims of the plan that do not hold."""

    seconds: float
    bound: float
    """Proven again: no plan takes less under the same cost model."""
    num_bytes: int
    """Peak memory per device."""
    unproven: float
    """Seconds by which the plan's bound lies above the one proven here: for them the solver's search stands alone."""
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "the plan does not hold: " + "; ".join(self.problems)
        rest = f" ({format_seconds(self.unproven)} less than the search found)" if self.unproven else ""
        return (
            f"the plan holds: {format_seconds(self.seconds)} a step, no plan takes less than "
            f"{format_seconds(self.bound)}{rest}, {format_bytes(self.num_bytes)} per device"
        )


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
    """Arguments of torch's `parallelize_module` and `fully_shard` that correspond to a plan.

    `styles` has a ParallelStyle per module, for the mesh axis `axis` (None if the plan splits no matrix). `shards` maps
    each module that `fully_shard` is called on to whether its weights are freed after the forward, the root ("") last.
    `sharded` and `replicated` are the mesh axes on which samples differ: with sharded weights, or whole ones.
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
