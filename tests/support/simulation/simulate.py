"""Many ranks in one process: every tensor holds one value per rank, and collectives run on those values.

Built on torch's LocalTensorMode. Good for the numbers of collectives and for shapes; it cannot run point-to-point
sends, code that branches on the rank, or custom ops (which it gets wrong silently). For those, use `tests.ranks`.

    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = from_ranks([torch.tensor(float(rank)) for rank in range(4)])
        ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, local_tensor_mode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def simulate(world_size: int) -> Iterator[LocalTensorMode]:
    """A process group of `world_size` ranks that all live in this process, from rank 0's point of view."""
    assert not dist.is_initialized(), "this process already belongs to a process group"
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with LocalTensorMode(world_size) as mode:
            yield mode
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which holds meshes of this group, and takes them for equal ones of the next


def from_ranks(values: Sequence[torch.Tensor], requires_grad: bool = False) -> LocalTensor:
    """The tensor that is `values[rank]` on each rank of the running simulation; a new leaf."""
    mode = _mode()
    assert len(values) == len(mode.ranks), f"{len(values)} values for {len(mode.ranks)} ranks"
    with mode.disable():  # else each of them would become one value per rank
        local = LocalTensor({rank: value.detach() for rank, value in enumerate(values)})
    return local.requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]


def local_values(x: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the value of `x` on each rank; a plain tensor is the same on all of them."""
    assert x is not None, "there is no tensor, perhaps because no gradient reached it"
    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    mode = _mode()
    with mode.disable():
        if isinstance(x, LocalTensor):
            return [x._local_tensors[rank].detach() for rank in sorted(mode.ranks)]
        return [x.detach() for _ in mode.ranks]


def _mode() -> LocalTensorMode:
    mode = local_tensor_mode()
    assert mode is not None, "call this inside `with simulate(world_size):`"
    return mode
