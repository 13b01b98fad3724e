"""A plan as torchtitan's arguments: a degree per kind of parallelism, what is freed, and what is computed again."""

from __future__ import annotations

import math
from collections import Counter

from autopar.costs.plans.answers import TorchtitanArguments
from autopar.costs.plans.plan import Plan
from autopar.views.translation.axis_purposes import TENSOR, WORDS, purposes, recomputed, stored_in_parts

KNOWN = (TENSOR, "data", "sequence", "expert")


def torchtitan_args(plan: Plan) -> TorchtitanArguments:
    """Return the arguments of torchtitan that come nearest to a plan, loaded or not."""
    purpose, parts = purposes(plan), stored_in_parts(plan)
    lost = [
        f"{axis}: divided by {each}; torchtitan has no degree for it"
        for axis, each in purpose.items()
        if each not in KNOWN
    ]

    def degree(*kinds: str, sharded: bool | None = None) -> int:
        axes = (axis for axis in plan.mesh.names if purpose[axis] in kinds)
        return math.prod(plan.mesh.size(axis) for axis in axes if sharded is None or (axis in parts) == sharded)

    experts = degree("expert")
    degrees = {
        "data_parallel_replicate_degree": degree("data", sharded=False),
        "data_parallel_shard_degree": degree("data", sharded=True) * experts,
        "tensor_parallel_degree": degree(TENSOR),
        "context_parallel_degree": degree("sequence"),
        "expert_parallel_degree": experts,
    }
    arguments = [f"--parallelism.{name}={count}" for name, count in degrees.items()]
    arguments += [f"--parallelism.fsdp_reshard_after_forward={_reshard(plan, lost)}"]
    if degrees["tensor_parallel_degree"] > 1 and not _loss_in_parts(plan, purpose):
        arguments.append("--parallelism.disable_loss_parallel")
    if degrees["tensor_parallel_degree"] > 1 and not _positions_in_parts(plan, purpose):
        lost.append("torchtitan divides positions, too, where it splits matrices; the plan does not")
    arguments += _recomputation(plan, lost)
    return TorchtitanArguments(tuple(arguments), (*lost, *_deviating_products(plan, purpose)))


def _reshard(plan: Plan, lost: list[str]) -> str:
    kept = Counter(plan.is_saved(row.name) for row in plan.rows if row.kind == "parameter" and "S(" in row.layout)
    if kept[True] and kept[False]:
        lost.append(f"{kept[True]} of {kept.total()} weights in parts are saved for the backward, here those of most")
    return "never" if kept[True] > kept[False] else "always"


def _loss_in_parts(plan: Plan, purpose: dict[str, str]) -> bool:
    """Return whether the loss takes its classes in parts on a tensor-parallel axis."""
    axes = [position for position, axis in enumerate(plan.mesh.names) if purpose[axis] == TENSOR]
    losses = [row for row in plan.rows if row.kind == "call" and "loss" in row.operation]
    return any(row.roles[position] == "column" for row in losses for position in axes)


def _positions_in_parts(plan: Plan, purpose: dict[str, str]) -> bool:
    """Return whether some call takes its positions in parts on a tensor-parallel axis, as norms between blocks do."""
    axes = [position for position, axis in enumerate(plan.mesh.names) if purpose[axis] == TENSOR]
    return any(row.roles[position] == "sequence" for row in plan.rows if row.kind == "call" for position in axes)


def _recomputation(plan: Plan, lost: list[str]) -> list[str]:
    modes = Counter(plan.recompute.values())
    mode = max(modes, key=lambda each: modes[each], default="none")
    if len(modes) > 1:
        lost.extend(f"{each}; here all are {mode!r}" for each in recomputed(plan))
    if mode == "full_save_collectives":
        lost.append("recompute: results of collectives are saved here; torchtitan's full mode gathers again")
        mode = "full"
    op = ["--activation_checkpoint.selective_ac_option=op"] if mode == "selective" else []
    return [f"--activation_checkpoint.mode={mode}", *op]


def _deviating_products(plan: Plan, purpose: dict[str, str]) -> list[str]:
    """Return products that are split on an axis unlike most, which a degree per axis cannot express."""
    found = []
    for position, axis in enumerate(plan.mesh.names):
        others = Counter(
            row.roles[position]
            for row in plan.rows
            if row.kind == "call"
            and row.operation == "linear"
            and WORDS.get(row.roles[position], row.roles[position]) != purpose[axis]
        )
        found += [
            f"{axis}: {count} matrices are divided by {role}, not by {purpose[axis]}" for role, count in others.items()
        ]
    return found
