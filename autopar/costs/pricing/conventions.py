"""Conventions on the memory that a framework holds in addition to the tensors of the model's graph.

    autopar     what autopar's runtime holds: tensors, and on a GPU the allocator's gaps, CUDA's context, NCCL's buffers
                and cuBLAS's workspaces, as the hardware profile says
    tensors     tensors alone
    megatron    what Megatron-LM holds at the same layouts, for comparisons with it
    deepspeed   what Megatron-DeepSpeed holds

A memory limit applies to the device: it counts all of these parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from autopar.costs.hardware.profile import Hardware
from autopar.costs.hardware.reserved import Reserved
from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh

Number = TypeVar("Number", int, float)

MIB = 2**20
MEGATRON_WORKSPACES = 2 * 32 * MIB
"""Workspaces of the forward's and the backward's cuBLAS handle with CUBLAS_WORKSPACE_CONFIG=:4096:8, which Megatron-LM
sets for deterministic products."""


@dataclass(frozen=True, slots=True)
class MemoryConventions:
    """Parts of device memory that a plan counts; None takes the hardware profile's number, 0 leaves a part out."""

    allocator_factor: float | None = None
    """Bytes that the caching allocator reserves for each byte of tensors at the peak; 1 leaves its gaps out."""
    context_bytes: int | None = None
    """CUDA context with the kernels of libraries."""
    communicator_bytes: int | None = None
    """Buffers of one NCCL communicator."""
    workspace_bytes: int | None = None
    """Workspaces of cuBLAS."""
    dropout_masks: bool = False
    """True if dropout saves a byte per element; autopar's draws again in the backward."""
    loss_in_place: bool = False
    """True if a cross-entropy keeps its probabilities, and makes its gradient, in the memory of its logits."""
    main_gradients: bool = False
    """True if gradients are added up in buffers (in float32, or wider) that last from the first step on, also if a step
    has one micro-batch."""

    def __post_init__(self) -> None:
        if self.allocator_factor is not None and not self.allocator_factor >= 1:
            raise InputError(f"allocator_factor={self.allocator_factor!r}; give a factor of at least 1, or None.")
        for name in ("context_bytes", "communicator_bytes", "workspace_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise InputError(f"{name}={value!r}; give a whole number of bytes of at least 0, or None.")

    @classmethod
    def of(cls, conventions: str | MemoryConventions) -> MemoryConventions:
        """Return the conventions of a name, or those given; raise InputError for a name that is not known.

        >>> MemoryConventions.of("tensors").context_bytes
        0
        """
        if isinstance(conventions, MemoryConventions):
            return conventions
        if conventions not in CONVENTIONS:
            raise InputError(
                f"Memory(conventions={conventions!r}); give one of {', '.join(map(repr, CONVENTIONS))}, or an "
                "autopar.MemoryConventions."
            )
        return CONVENTIONS[conventions]

    def reserved(self, hardware: Hardware, mesh: Mesh) -> Reserved:
        """Return what a device of a mesh, with the axis of a pipeline, holds besides tensors."""
        each = _stated_or(self.communicator_bytes, hardware.communicator_bytes)
        return Reserved(
            _stated_or(self.allocator_factor, hardware.allocator_factor),
            _stated_or(self.context_bytes, hardware.context_bytes),
            each * num_communicators(mesh),
            _stated_or(self.workspace_bytes, hardware.workspace_bytes),
        )


CONVENTIONS: Mapping[str, MemoryConventions] = MappingProxyType(
    {
        "autopar": MemoryConventions(),
        "tensors": MemoryConventions(1.0, 0, 0, 0),
        "megatron": MemoryConventions(
            workspace_bytes=MEGATRON_WORKSPACES, dropout_masks=True, loss_in_place=True, main_gradients=True
        ),
        "deepspeed": MemoryConventions(dropout_masks=True, loss_in_place=True),
    }
)


OF_AUTOPAR = CONVENTIONS["autopar"]


def num_communicators(mesh: Mesh) -> int:
    """Return how many NCCL communicators a rank is in: one per axis of several devices, and one of all ranks.

    Groups of joined axes are not counted: NCCL allocates no buffers before a communicator's first message.

    >>> [num_communicators(Mesh(axes)) for axes in ({"dp": 1}, {"dp": 8}, {"dp": 2, "tp": 4})]
    [0, 1, 3]
    """
    axes = sum(size > 1 for size in mesh.sizes)
    return axes if axes < 2 else axes + 1


def _stated_or(conventions: Number | None, otherwise: Number) -> Number:
    return otherwise if conventions is None else conventions
