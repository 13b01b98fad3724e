"""A mesh of which one rank runs, alone: its collectives move nothing, so that what it runs can be counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(axes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Have a mesh whose rank 0 is this process."""
    dist.init_process_group("fake", rank=0, world_size=math.prod(axes.values()), store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
