"""Bytes of copies in host memory, and those of a device without them, as segments on the host are run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.recompute import on_host
from autopar.tools.benchmarking.meters import LiveBytes


class HostBytes:
    """Bytes of copies in host memory: of all that were made, and at the highest moment."""

    def __init__(self) -> None:
        self.sent = self.highest = 0
        self._copies: list[weakref.ref[torch.UntypedStorage]] = []

    def made(self, memory: Tensor) -> None:
        self.sent += memory.nbytes
        self._copies.append(weakref.ref(memory.untyped_storage()))
        self.highest = max(self.highest, self.now)

    @property
    def now(self) -> int:
        there = (each() for each in self._copies)
        return sum(each.nbytes() for each in there if each is not None)

    def has(self, memory: torch.UntypedStorage) -> bool:
        return any(each() is not None and each()._cdata == memory._cdata for each in self._copies)  # type: ignore[union-attr]


@contextmanager
def counted() -> Iterator[HostBytes]:
    """Count copies on the host that are made inside the block."""
    found, memory = HostBytes(), on_host.host_memory

    def noting(*args: Any) -> Tensor:
        made = memory(*args)
        found.made(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_host, "host_memory", noting)
        yield found


class DeviceBytes(LiveBytes):
    """Live bytes without copies on the host, which on CPU ranks look like any other memory."""

    def __init__(self, tensors: Any, host: HostBytes) -> None:
        self.host = host
        super().__init__(tensors)

    def _count(self) -> int:
        return super()._count() - self.host.now
