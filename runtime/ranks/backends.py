"""Backends that carry the tensors of a device: a group may have one for each kind of device, or one for all.

Messages between the hosts of a group go through a backend for CPU tensors. To read a message on a GPU, a host would
have to wait for it, and with it for all work that the GPU was given before.

`torch.distributed.get_backend` says "undefined" of groups that were made without naming one, and one of the two of
"cpu:gloo,cuda:nccl".
"""

from __future__ import annotations

from typing import cast

import torch.distributed as dist

HOST = "cpu"
"""The device of what hosts tell each other."""


def backend_of(group: dist.ProcessGroup, device: str) -> str:
    """Return the backend, as "nccl", by which a group moves the tensors of a type of device; empty where it has
    none.
    """
    config = dist.BackendConfig(cast(dist.Backend, dist.Backend(dist.get_backend_config(group))))
    return config.get_device_backend_map().get(device, "")


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group itself where it moves tensors of the CPU, else a new one of its ranks, which call this
    together.
    """
    if backend_of(group, HOST):
        return group
    made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
