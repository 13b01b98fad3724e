"""Options of `compile` are equal on all ranks: each is compared before the first of them is read.

Ranks with different options make different graphs, and wait for each other's collectives. Fields of a group that are
marked `of_each_rank` may differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.costs.plans.plan import Plan
from autopar.errors import PeerError
from autopar.planning.options.definition import Group
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.runtime.ranks.agreement import gathered, many_processes

NOT_GIVEN = "…"
MAX_SHOWN = 100
"""Characters of a value that a message shows."""


def agree_on_options(function: str, given: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Compare the options that all ranks of a mesh give to a function; called by all of them.

    Raises PeerError on every rank for the first option that differs.
    """
    if not many_processes(mesh):
        return
    (here, mine), *others = gathered((dist.get_rank(), {name: _described(each) for name, each in given.items()}), mesh)
    for there, described in others:
        for name in dict.fromkeys((*mine, *described)):
            own, other = mine.get(name, NOT_GIVEN), described.get(name, NOT_GIVEN)
            if own != other:
                raise PeerError(
                    f"{function} was given {name}={_shown(own, other)} on rank {here} and {name}={_shown(other, own)} "
                    f"on rank {there}. Every rank needs the same options; give {name} the same value on every rank."
                )


def _described(value: Any) -> str:
    """Return a text that is equal on two ranks where a value means the same."""
    if isinstance(value, Plan | PipelinePlan):
        decisions = json.dumps(_decisions_of(value), sort_keys=True, default=str)
        return f"<{type(value).__name__} {_digest(decisions)}>"
    if isinstance(value, Group):
        specified = (f"{each.name}={_described(found)}" for each, found in value.given() if not each.of_each_rank)
        return f"{type(value).__name__}({', '.join(specified)})"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"[{', '.join(map(_described, value))}]"
    if type(value).__repr__ is object.__repr__:  # this repr contains an address
        return f"<{type(value).__qualname__}>"
    return repr(value)


def _decisions_of(plan: Plan | PipelinePlan) -> dict[str, Any]:
    """Return the decisions of a plan; the search's time and bound may differ between ranks that planned alike."""
    if isinstance(plan, PipelinePlan):
        stages = [(stage.number, stage.blocks, _decisions_of(stage.plan)) for stage in plan.stages]
        return {"mesh": str(plan.mesh), "axis": plan.axis, "schedule": plan.schedule, "stages": stages}
    names = ("mesh", "fingerprint", "choices", "recompute", "prefetch", "reduce_each", "offload", "imbalance")
    return {name: getattr(plan, name) for name in (*names, "memory_limit")}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _shown(text: str, other: str) -> str:
    """Return a text, shortened; with a digest where the shortened ones would look the same."""
    short = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return short if text[:MAX_SHOWN] != other[:MAX_SHOWN] else f"{short} ({_digest(text)})"
