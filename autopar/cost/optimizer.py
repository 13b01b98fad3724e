"""What an optimizer keeps and moves per parameter: its state, and a copy of the weights in float32 where asked for.

adamw        two moments in the parameter's dtype (torch.optim.AdamW), in float32 beside master copies
adamw-8bit   two moments of one byte, and a float32 scale per block of 256 (Dettmers et al., ICLR 2022)
sgd          nothing (torch.optim.SGD without momentum)
none         nothing, and no step
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import InputError
from autopar.program.program import TensorInfo

NAMES = ("adamw", "sgd", "adamw-8bit", "none")
BLOCK = 256  # elements that share a scale: bitsandbytes' optimizers
MASTER_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer by name; with `master_copies`, parameters below float32 have a copy in float32 that it updates.

    Raises InputError for a name that is not known.
    """

    name: str = "adamw"
    master_copies: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise InputError(f"optimizer={self.name!r} is not known; optimizers are {', '.join(map(repr, NAMES))}.")

    def master_bytes(self, info: TensorInfo) -> int:
        """Bytes of the master copy of one element."""
        copied = self.master_copies and info.requires_grad and info.dtype.itemsize < MASTER_BYTES
        return MASTER_BYTES if copied else 0

    def state_bytes(self, info: TensorInfo) -> float:
        """Bytes of optimizer state of one element."""
        if not info.requires_grad or self.name in ("sgd", "none"):
            return 0.0
        if self.name == "adamw-8bit":
            return 2.0 * (1 + 4 / BLOCK)
        return 2.0 * max(info.dtype.itemsize, self.master_bytes(info))

    def step_bytes(self, info: TensorInfo) -> float:
        """Bytes that one step reads and writes per element: gradient read, weight and state read and written."""
        if not info.requires_grad or self.name == "none":
            return 0.0
        return 3.0 * info.dtype.itemsize + 2 * self.state_bytes(info) + 2 * self.master_bytes(info)


ADAMW = Optimizer()
