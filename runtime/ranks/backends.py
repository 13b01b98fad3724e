"""Which backend carries the tensors of a device: a group may have one for each kind of device, or one for all.

`torch.distributed.get_backend` says "undefined" of groups that were made without naming one, and one of the two of
"cpu:gloo,cuda:nccl".
"""

from __future__ import annotations

import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: str) -> str:
    """The backend, as "nccl", by which a group moves the tensors of a type of device; empty where it has none."""
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    return config.get_device_backend_map().get(device, "")
