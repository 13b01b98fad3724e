"""Meters of a training step: bytes moved by collectives of any origin, and bytes of tensors at the peak.

Collectives are counted at torch dispatch, so that those of DDP, FSDP2 and DTensor are counted alike. The convention is
that of `runtime.collectives.mesh_axes`: the bytes of the whole tensor (an all-gather's output, a reduce-scatter's
input).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.collectives.mesh_axes import Traffic

OPERATIONS: Mapping[str, tuple[str, int]] = {
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    "_c10d_functional.broadcast": ("broadcast", 0),
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.allreduce_coalesced_": ("all_reduce", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.alltoall_": ("all_to_all", 1),
    "c10d.broadcast_": ("broadcast", 0),
}
"""Operation → the collective it is, and the position of the argument whose bytes count."""
INPUT_IS_A_PART = "_c10d_functional.all_gather"  # such operations take a part and return the whole


class CollectiveCounter(TorchDispatchMode):
    """Counts every collective that torch dispatches inside the block, by the axis that its group is.

    `axes` are the names of groups' axes by `group_name`; a group that it does not name goes by that name itself.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._axes = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; count it where it is a collective between ranks."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the DTensor's operations on its local tensors come here again
        name = f"{func.namespace}.{func._opname}"
        if name in OPERATIONS:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        collective, position = OPERATIONS[name]
        group = _group_of(args)
        num_bytes = sum(x.nbytes for x in pytree.tree_leaves(args[position]) if isinstance(x, Tensor))
        if name.startswith(INPUT_IS_A_PART):
            num_bytes *= group.size()
        if group.size() > 1:
            key = collective, self._axes.get(group.group_name, group.group_name)
            self.traffic.num_bytes[key] += num_bytes
            self.traffic.calls[key] += 1


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group among the arguments of a collective: an object, or its name, which comes last."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            if "ProcessGroup" in argument._type().qualified_name():
                return dist.ProcessGroup.unbox(argument)
        elif isinstance(argument, dist.ProcessGroup):
            return argument
    return _resolve_process_group(args[-1])


def peak_bytes(step: Callable[[], object], clear: Callable[[], object], held: Callable[[], Iterable[Tensor]]) -> int:
    """Return the bytes of tensors at the highest moment of an eager step on the CPU: bytes resident before it, and
    those it makes.

    Args:
        step: one step of training that leaves its gradients.
        clear: lets the gradients go, as the next step begins with.
        held: parameters, buffers, gradients and optimizer state, which exist already.

    Memory that a kernel allocates and frees inside is not seen, nor is that of compiled code.
    """
    live = LiveBytes(held())
    clear()
    live.look()
    with live:
        step()
    return live.highest


class LiveBytes(TorchDispatchMode):
    """Watches the storages of some tensors and of all that operations return inside the block.

    After each operation it asks which of them still exist, as a profiler does not hear of memory that another thread
    frees: gloo's threads are often the last to hold what was sent. A new highest moment counts only if it is one after
    `SETTLING_S`, too, as such a thread may be late where the machine is busy.
    """

    SETTLING_S: Final = 0.001

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.highest = 0
        self._known: dict[int, StorageWeakRef] = {}
        self._register(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, meet its outputs, and look."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the DTensor's operations on its local tensors come here again
        result = func(*args, **(kwargs or {}))
        self._register(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        self.look()
        return result

    def look(self) -> int:
        """Return the bytes that the storages hold now: a storage may be gone, or empty for a while."""
        total = self._count()
        if total > self.highest:
            time.sleep(self.SETTLING_S)
            total = self._count()
        self.highest = max(self.highest, total)
        return total

    def _count(self) -> int:
        total = 0
        for key, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        return total

    def _register(self, tensors: Iterable[Tensor]) -> None:
        for key, storage in _storages(tensors).items():
            known = self._known.get(key)
            if known is None or known.expired():
                self._known[key] = StorageWeakRef(storage)


def held_in_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return parameters, buffers, gradients and optimizer state."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
    return [*parameters, *model.buffers(), *gradients, *state]


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages that lie under the tensors on this rank, each once; gradients of a bucket share one."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in local if x.device.type != "meta"}


def cuda_peak_bytes(step: Callable[[], object], before: int) -> int:
    """Return the bytes at the highest moment of a step on a GPU, beyond the `before` that others had allocated."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
