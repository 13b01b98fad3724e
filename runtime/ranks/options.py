"""The options of `compile` are those of all ranks: each is compared before the first of them is read.

Ranks with different options make different graphs, and wait for each other's collectives. The options are taken from
the signature of `compile`, so that a new one is compared without being named here.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.costs.plans.plan import Plan
from autopar.errors import PeerError
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.runtime.ranks.agreement import gathered, many_processes

OF_EACH_RANK = frozenset({"plan_cache"})
"""Options that ranks may choose for themselves: the first rank alone reads a folder of plans."""
MAX_SHOWN = 100
"""Characters of a value that a message shows."""


def agree_on_options(function: Callable[..., Any], given: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Compare what all ranks of a mesh give for the keyword-only parameters of a function; called by all of them.

    Raises PeerError on every rank for the first option that differs.
    """
    if not many_processes(mesh):
        return
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name not in OF_EACH_RANK]
    first, *others = gathered((dist.get_rank(), [_described(given[name]) for name in names]), mesh)
    for rank, described in others:
        for name, here, there in zip(names, first[1], described, strict=True):
            if here != there:
                raise PeerError(
                    f"{function.__name__} was given {name}={_shown(here, there)} on rank {first[0]} and "
                    f"{name}={_shown(there, here)} on rank {rank}. Every rank needs the same options; give {name} the "
                    "same value on every rank."
                )


def _described(value: Any) -> str:
    """A text that is equal on two ranks where a value means the same."""
    if isinstance(value, Plan | PipelinePlan):
        decisions = json.dumps(_decisions_of(value), sort_keys=True, default=str)
        return f"<{type(value).__name__} {_digest(decisions)}>"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"[{', '.join(map(_described, value))}]"
    if type(value).__repr__ is object.__repr__:  # which shows an address
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
    """A text, shortened; with a digest where the shortened ones would look the same."""
    short = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return short if text[:MAX_SHOWN] != other[:MAX_SHOWN] else f"{short} ({_digest(text)})"
