"""Messages between two ranks that share a GPU: gloo has none between GPUs, so each is copied to the host and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


class Later:
    """A message on its way: `end` runs once, when it has been waited for."""

    def __init__(self, work: Any, end: Callable[[], object]) -> None:
        self._work, self._end = work, end

    def wait(self, *timeout: Any) -> bool:
        """Wait for the message."""
        found = self._work.wait(*timeout)
        end, self._end = self._end, lambda: None
        end()
        return found

    def is_completed(self) -> bool:
        """Return whether the message has left or arrived."""
        return self._work.is_completed()


def stage_messages() -> None:
    """Have every message between two ranks of this process go through the host from now on."""
    send, receive = dist.isend, dist.irecv

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = tensor.detach().to("cpu", copy=True)
        return Later(send(copy, *args, **kwargs), lambda: copy)  # which is kept until then

    def irecv(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = torch.empty_like(tensor, device="cpu")

        def arrive() -> None:
            with torch.no_grad():
                tensor.copy_(copy)

        return Later(receive(copy, *args, **kwargs), arrive)

    def send_now(*args: Any, **kwargs: Any) -> None:
        isend(*args, **kwargs).wait()

    def receive_now(*args: Any, **kwargs: Any) -> int:
        irecv(*args, **kwargs).wait()
        return kwargs.get("group_src", 0)

    staged = {"isend": isend, "irecv": irecv, "send": send_now, "recv": receive_now}
    for module in (dist, c10d):
        for name, function in staged.items():
            setattr(module, name, function)
