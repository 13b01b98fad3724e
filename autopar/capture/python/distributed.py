"""Collectives and rank queries in a traced forward, refused by name.

A captured forward is the computation of one process on the batch of all ranks; a collective that it calls would run
while the model is traced, and wait for ranks that do something else. Libraries that ask for the rank or the number of
ranks, to leave out what one process needs not do, get the answers of one process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.python.outside import replaced_in
from autopar.capture.python.user_code import is_installed, is_users, where
from autopar.errors import CaptureError

COLLECTIVES = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather
    gather_object irecv isend monitored_barrier recv recv_object_list reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor scatter scatter_object_list send send_object_list
"""
"""Functions of torch.distributed; those of its modules below are found there."""
MODULES = ("torch.distributed._functional_collectives", "torch.distributed.nn.functional")
OF_GROUPS = """
    _allgather_base _reduce_scatter_base allgather allgather_coalesced allgather_into_tensor_coalesced allreduce
    allreduce_coalesced alltoall alltoall_base barrier broadcast gather recv reduce reduce_scatter scatter send
"""
"""Methods of a ProcessGroup."""
QUERIES = {"get_rank": 0, "get_world_size": 1, "get_node_local_rank": 0}
"""Functions of torch.distributed → what they give in a process that is alone."""
OF_MESHES = {"get_rank": 0, "get_local_rank": 0, "get_coordinate": None}
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")

NEEDED = "The captured forward sees the batch of all ranks, as one process does."


def check_no_wrappers(model: nn.Module) -> None:
    """Raise CaptureError where a module of the model is divided or replicated already."""
    for path, module in model.named_modules():
        kind = next((base.__name__ for base in type(module).__mro__ if _is_wrapper(base)), None)
        if kind is not None:
            advice = "build the model without fully_shard" if kind == "FSDPModule" else "use its .module in its place"
            raise CaptureError(
                f"{path or 'the model'} is wrapped already ({kind}), and the plan divides and replicates parameters "
                f"itself; {advice}."
            )


def _is_wrapper(kind: type) -> bool:
    return kind.__name__ in WRAPPERS and kind.__module__.partition(".")[0] == "torch"


@contextlib.contextmanager
def refuse_collectives(functions: Sequence[FunctionType]) -> Iterator[None]:
    """Raise CaptureError where a forward calls a collective, or its own code asks for the rank.

    `functions` are those of the user that the model calls, in whose files they may be globals.
    """
    replaced: dict[int, Any] = {}
    for name in COLLECTIVES.split():
        function = getattr(distributed_c10d, name, None)
        if function is not None:
            replaced[id(function)] = _refusing(function, f"torch.distributed.{name}")
    modules = [sys.modules[name] for name in MODULES if name in sys.modules]
    for module in modules:
        for name, function in vars(module).items():
            if isinstance(function, FunctionType) and _is_collective(name, function, module.__name__):
                replaced[id(function)] = _refusing(function, f"{module.__name__}.{name}")
    for name, alone in QUERIES.items():
        function = getattr(distributed_c10d, name)
        replaced[id(function)] = _stand_in(function, f"torch.distributed.{name}", alone)
    namespaces = [vars(dist), vars(distributed_c10d), *map(vars, modules)]
    with contextlib.ExitStack() as stack:
        for name in OF_GROUPS.split():
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:
                refusing = _refusing(method, f"ProcessGroup.{name}")
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, refusing))
        for name, alone in OF_MESHES.items():
            answering = _stand_in(getattr(DeviceMesh, name), f"DeviceMesh.{name}", alone)
            stack.enter_context(mock.patch.object(DeviceMesh, name, answering))
        stack.enter_context(replaced_in(replaced, [*namespaces, *(each.__globals__ for each in functions)]))
        yield


def _is_collective(name: str, function: FunctionType, module: str) -> bool:
    helper = name.startswith("_") or name.endswith(("_backward", "_setup_context")) or name == "wait_tensor"
    return not helper and function.__module__ == module


def _caller(thread: int) -> FrameType | None:
    """Return the frame that called torch.distributed if it is the forward's: in its thread, of a user or a library."""
    frame: FrameType | None = sys._getframe(2) if threading.get_ident() == thread else None
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.distributed"):
        frame = frame.f_back
    return frame if frame is not None and is_users(frame.f_globals.get("__name__")) else None


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    own = threading.get_ident()

    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        caller = _caller(own)
        if caller is not None:
            raise CaptureError(
                f"the forward calls {name}() ({where(caller)}), and a captured forward calls no collectives of its "
                f"own. {NEEDED} Leave the call out, and use what it is given as its result."
            )
        return function(*args, **kwargs)

    return refuse


def _stand_in(function: Callable[..., Any], name: str, alone: int | None) -> Callable[..., Any]:
    own = threading.get_ident()

    @functools.wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        caller = _caller(own)
        if caller is None:
            return function(*args, **kwargs)
        if is_installed(caller.f_code) and alone is not None:
            return alone
        written = "leave the call out" if alone is None else f"write {alone} in its place"
        raise CaptureError(
            f"the forward calls {name}() ({where(caller)}): a graph would keep the answer, and ranks would run "
            f"different graphs. {NEEDED} Depend on no rank: {written}."
        )

    return answer
