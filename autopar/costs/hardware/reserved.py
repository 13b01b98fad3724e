"""Device memory beyond a plan's tensors, and the part of a device's limit that remains for tensors.

    reserved = tensors × allocator factor + CUDA context + NCCL buffers + cuBLAS workspaces + inputs of a CUDA graph
    limit on tensors = (limit on the device - context - buffers - workspaces - inputs) / allocator factor

The pool of a CUDA graph holds the tensors of a step, which are counted as tensors, and copies of the batch.

A user's memory limit applies to the device. The search counts only tensors; `Reserved.tensors_within` translates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.console.units import format_bytes
from autopar.errors import InfeasibleError, PlanError
from autopar.files.schema import MAX_WHOLE

NAMES = {
    "context_bytes": "CUDA context",
    "communicator_bytes": "NCCL buffers",
    "workspace_bytes": "cuBLAS workspaces",
    "graph_bytes": "inputs of the CUDA graph",
}
"""Field of `Reserved` → its name in tables."""
ALLOCATOR = "allocator"


@dataclass(frozen=True, slots=True)
class Reserved:
    """Memory of a device beyond its tensors; by default none, as on a CPU."""

    allocator_factor: float = 1.0
    """Bytes that the caching allocator reserves for each byte of tensors at the peak."""
    context_bytes: int = 0
    """CUDA context with the kernels of libraries."""
    communicator_bytes: int = 0
    """Buffers of all NCCL communicators."""
    workspace_bytes: int = 0
    """Workspaces of all cuBLAS handles."""
    graph_bytes: int = 0
    """Copies of a batch, from which the CUDA graph of a step takes it."""

    def __post_init__(self) -> None:
        if not 1 <= self.allocator_factor < math.inf:
            raise PlanError(f"allocator_factor is {self.allocator_factor}; give a factor of at least 1.")
        for name in NAMES:
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} is {getattr(self, name)}; give bytes of at least 0.")

    def __bool__(self) -> bool:
        return self != Reserved()

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the plan."""
        return self.context_bytes + self.communicator_bytes + self.workspace_bytes + self.graph_bytes

    def on_device(self, tensors: int) -> int:
        """Return the bytes of a device that a plan takes whose tensors have so many at the peak."""
        return math.ceil(tensors * self.allocator_factor) + self.fixed_bytes

    def tensors_within(self, limit: int) -> int:
        """Return the most bytes of tensors that stay within a limit on the device; negative if none do."""
        near = math.floor((limit - self.fixed_bytes) / self.allocator_factor)
        return next(each for each in (near + 1, near, near - 1) if self.on_device(each) <= limit)  # on_device rounds

    def parts(self, tensors: int) -> dict[str, int]:
        """Return what the bytes on the device beyond tensors are, leaving out parts of none."""
        found = {ALLOCATOR: math.ceil(tensors * self.allocator_factor) - tensors}
        found |= {name: getattr(self, field) for field, name in NAMES.items()}
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes}

    def check(self, limit: int) -> None:
        """Raise InfeasibleError if a limit on the device leaves nothing for tensors."""
        if self.tensors_within(limit) < 0:
            raise InfeasibleError(
                f"the memory limit is {format_bytes(limit)} ({limit} bytes) per device, but "
                f"{format_bytes(self.fixed_bytes)} of it are no tensors: {self._fixed()}. Raise the limit, or give "
                'Memory(conventions="tensors") to limit tensors alone.'
            )

    def explained(self, limit: int, least: int | None = None) -> str:
        """Return a sentence on a limit that no plan keeps to, in bytes of the device and of tensors.

        Args:
            limit: Bytes of the device.
            least: Bytes of tensors that the smallest plan has; None if not known.
        """
        needed = (
            ""
            if least is None
            else (
                f" The least is {format_bytes(least)} of tensors, {format_bytes(self.on_device(least))} on the device."
            )
        )
        return (
            f"On the device the limit is {format_bytes(limit)}, which leaves "
            f"{format_bytes(self.tensors_within(limit))} for tensors: {self.words()}.{needed}"
        )

    def both(self, tensors: int) -> str:
        """Say how many bytes a plan takes on the device and, if that is not all, how many of these are tensors.

        >>> Reserved(1.03, context_bytes=5 * 10**8).both(10**9)
        '1.53 GB (1.00 GB of tensors)'
        """
        whole = format_bytes(self.on_device(tensors))
        return f"{whole} ({format_bytes(tensors)} of tensors)" if self else whole

    def words(self) -> str:
        """Return what stands besides tensors, as text: "allocator × 1.03, CUDA context 500 MB"."""
        factor = f"{ALLOCATOR} × {self.allocator_factor:g}" if self.allocator_factor > 1 else ""
        return ", ".join(filter(None, (factor, self._fixed())))

    def _fixed(self) -> str:
        sizes = {name: getattr(self, field) for field, name in NAMES.items()}
        return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in sizes.items() if num_bytes)

    def to_json(self, tensors: int) -> dict[str, float]:
        """Return the fields, with the bytes on the device; without those of a graph where there is none."""
        fields = {name: value for name, value in asdict(self).items() if name != "graph_bytes" or value}
        return {**fields, "bytes": self.on_device(tensors)}

    @classmethod
    def of_json(cls, values: Mapping[str, Any] | None) -> Reserved:
        """Return what `to_json` wrote; nothing if a plan does not say it."""
        return cls(**{name: value for name, value in (values or {}).items() if name != "bytes"})

    def check_can_be_written(self, tensors: int) -> None:
        """Raise PlanError if no file has room for the bytes on the device."""
        if self.on_device(tensors) > MAX_WHOLE:
            raise PlanError(f"reserved is {self}; the most bytes of a device that a file can state are {MAX_WHOLE}")


NOTHING = Reserved()
