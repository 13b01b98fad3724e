"""Optimizer state per parameter and the bytes that a step moves, including float32 master copies if requested.

adamw        two moments in the parameter's dtype (torch.optim.AdamW), in float32 with master copies
adamw-8bit   two moments of one byte, a float32 scale per block of 256 and a table of its values (Dettmers et al., ICLR
             2022; torchao's); AdamW's where a device has few elements, or a block would not be full
sgd          nothing (torch.optim.SGD without momentum)
muon         one moment of each matrix (Jordan 2024; `autopar.optim.Muon`), AdamW's of all else
galore       of each matrix m×n, m ≥ n, a basis n×r and two moments m×r (Zhao et al. 2024; `autopar.optim.GaLoreAdamW`),
             AdamW's of all else
none         nothing, and no step

Parameter names decide which parameters are matrices (`optim.matrices`). All state is split as the parameter is. It is
on the device or, for AdamW only, optionally on the host (`costs.pricing.offload`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from autopar.console.names import OPTIMIZERS
from autopar.errors import InputError
from autopar.ir.program.program import TensorInfo
from autopar.optim.matrices import is_matrix, is_projected

Elements = npt.NDArray[np.int64]

STATES = OPTIMIZER, MASTER_COPIES = "optimizer", "master copies"
"""Names of optimizer state in `Plan.memory`."""
BLOCK = 256  # elements that share a scale: bitsandbytes' and torchao's optimizers
SMALLEST = 4096  # elements on a device that these keep in 8 bits
VALUES_BYTES = 256 * 4  # table of a byte's values, in float32, one per moment
MASTER_BYTES = 4  # float32
RANK = 128  # default of GaLore's reference implementation


@dataclass(frozen=True, slots=True)
class Offload:
    """Optimizer state on the host, which also runs the step; `devices` is the number of devices that share the host."""

    devices: int = 1


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer by name; with `master_copies`, parameters below float32 have a copy in float32 that it updates.

    `rank` is that of "galore", `matrices` are patterns of the names that "muon" and "galore" take as matrices, by
    default those in numbered layers. With `in_backward` a parameter is updated as soon as its gradient is there, which
    is then freed (`step_in_backward` of autopar's optimizers): in steps of one micro-batch. `Memory(offload=…)`
    says whether its state is on the host; with `gradients` on the "host" they leave for it as soon as the backward has
    made them, too (`OffloadedAdamW(gradients="host")`). Raises InputError for a name that is not known, or
    what another optimizer takes.
    """

    name: str = "adamw"
    master_copies: bool = False
    rank: int = RANK
    matrices: tuple[str, ...] | None = None
    in_backward: bool = False
    offload: Offload | None = None
    gradients: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise InputError(
                f"optimizer={self.name!r} is not known; optimizers are {', '.join(map(repr, OPTIMIZERS))}."
            )
        if self.rank < 1 or (self.rank != RANK and self.name != "galore"):
            raise InputError(f'optimizer={self.name!r} was given rank={self.rank}; "galore" takes one, of at least 1.')
        if self.matrices is not None and self.name not in ("muon", "galore"):
            raise InputError(
                f'optimizer={self.name!r} was given matrices={self.matrices}; "muon" and "galore" take some.'
            )
        if not isinstance(self.master_copies, bool):
            raise InputError(f"Optimizer(master_copies={self.master_copies!r}); give True or False.")
        if self.gradients not in ("device", "host"):
            raise InputError(f'gradients={self.gradients!r}; give "device" or "host".')
        if self.offload is not None or self.gradients == "host":
            self.check_offload()

    def check_offload(self) -> None:
        """Raise InputError for an optimizer that does not step on the host."""
        if self.name != "adamw":
            raise InputError(
                f'{self._asks_for_host} was given with optimizer={self.name!r}; the host steps for "adamw" alone '
                "(autopar.optim.OffloadedAdamW): plan for that, or leave it out."
            )
        if self.in_backward and self.gradients == "device":
            raise InputError(
                "offload was given with in_backward=True, and the host steps in the backward on gradients that have "
                'come to it; give gradients="host", too, or leave in_backward out.'
            )

    @property
    def _asks_for_host(self) -> str:
        return 'gradients="host"' if self.gradients == "host" else "offload"

    def check_microbatches(self, count: int) -> None:
        """Raise InputError where parameters are updated in the backward of a step that has several."""
        if self.in_backward and count > 1:
            raise InputError(
                f"optimizer={self.name!r} with in_backward=True updates parameters in the backward, and the step has "
                f"{count} micro-batches, whose gradients add up before an update; give microbatches=1, or leave "
                "in_backward out."
            )

    @property
    def sends_gradients(self) -> bool:
        """True if gradients are sent to the host as soon as the backward has made them."""
        return self.offload is not None and self.gradients == "host"

    @property
    def frees_gradients(self) -> bool:
        """True if each gradient is consumed and freed as soon as the backward has made it."""
        return self.in_backward or self.sends_gradients

    def takes(self, name: str, info: TensorInfo) -> bool:
        """Return whether a matrix optimizer ("muon" or "galore") takes the parameter `name` as a matrix."""
        if not info.requires_grad or self.name not in ("muon", "galore"):
            return False
        if self.name == "muon":
            return is_matrix(name, info.shape, self.matrices)
        return is_projected(name, info.shape, self.rank, self.matrices)

    def master_bytes(self, info: TensorInfo) -> int:
        """Return the bytes of the master copy of one element."""
        copied = self.master_copies and info.requires_grad and info.dtype.itemsize < MASTER_BYTES
        return MASTER_BYTES if copied else 0

    def state_bytes(self, info: TensorInfo, matrix: bool = False) -> float:
        """Return the bytes of optimizer state of one element, of a parameter that it takes as a matrix or not."""
        if not info.requires_grad or self.name in ("sgd", "none"):
            return 0.0
        if self.name == "adamw-8bit":
            return 2.0 * (1 + 4 / BLOCK)
        moment = self._moment_bytes(info)
        if not matrix:
            return 2.0 * moment
        if self.name == "muon":
            return float(moment)
        short, long = sorted(info.shape)
        return moment * self.rank * (short + 2 * long) / (short * long)

    def state_of(self, info: TensorInfo, matrix: bool = False) -> dict[str, float]:
        """Return the bytes of state per element of a parameter, on the device or the host, by name."""
        each = {OPTIMIZER: self.state_bytes(info, matrix), MASTER_COPIES: float(self.master_bytes(info))}
        return {name: size for name, size in each.items() if size}

    def state_bytes_of(self, name: str, info: TensorInfo, elements: Elements, matrix: bool = False) -> Elements:
        """Return the bytes on a device of the state `name` (see `state_of`), for so many elements of a parameter."""
        found = np.ceil(elements * self.state_of(info, matrix)[name]).astype(np.int64)
        if self.name != "adamw-8bit" or name != OPTIMIZER:
            return found
        in_8_bits = (elements >= SMALLEST) & (elements % BLOCK == 0)
        return np.where(in_8_bits, found + 2 * VALUES_BYTES, 2 * self._moment_bytes(info) * elements)

    def _moment_bytes(self, info: TensorInfo) -> int:
        """Return the bytes of one element of a moment that is kept whole."""
        return max(info.dtype.itemsize, self.master_bytes(info))

    def step_bytes(self, info: TensorInfo, matrix: bool = False) -> float:
        """Return the bytes per element of one step: gradient read, weight and state read and written."""
        if not info.requires_grad or self.name == "none":
            return 0.0
        return 3.0 * info.dtype.itemsize + 2 * self.state_bytes(info, matrix) + 2 * self.master_bytes(info)


ADAMW = Optimizer()
