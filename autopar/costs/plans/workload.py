"""Workload of a plan: model, inputs, dtypes, optimizer, model FLOPs, and the step of one device alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.files.schema import Maybe, Real, Record, Table, Text, Whole

FLOP_CONVENTION = (
    "model FLOPs of products and attention, forward and backward (6 per parameter and token), no recomputation"
)
"""FLOPs that MFU counts (PaLM, appendix B); for a forward alone, those of the forward."""


@dataclass(frozen=True, slots=True)
class OneDevice:
    """The same step on one device, without communication and recomputation."""

    seconds: float
    num_bytes: int
    capacity: int
    """Bytes that a device may hold: the plan's limit, or the memory that the hardware profile states."""
    reserved_bytes: int = 0
    """Bytes that the device holds besides the tensors, which are `num_bytes`."""

    @property
    def fits(self) -> bool:
        return self.num_bytes + self.reserved_bytes <= self.capacity


@dataclass(frozen=True, slots=True)
class Workload:
    """The computation of one step, whatever the plan, and the predicted time of its plan."""

    model: str
    """The class of the model, "" if it is not known."""
    num_parameters: int
    """Elements of all parameters."""
    inputs: Mapping[str, str]
    """Input → dtype and shape of one micro-batch, "int64[8, 4096]"."""
    microbatches: int
    """Micro-batches of a step."""
    samples: int
    """Samples of a step of all micro-batches; tokens and FLOPs are those of such a step, too."""
    tokens: int | None
    """None if no input holds token ids."""
    parameters: str
    """The dtypes of parameters, the most elements first: "float32"."""
    compute: str
    """The dtype of most FLOPs: "bfloat16"."""
    optimizer: str
    """Optimizer in words: "adamw, float32 master copies"."""
    seconds: float
    """Predicted seconds of a step of all micro-batches."""
    flops: float
    """Model FLOPs of all devices (`FLOP_CONVENTION`)."""
    ideal_seconds: float
    """Seconds of these FLOPs on one device at the profile's peak for their dtypes."""
    one_device: OneDevice
    """The same step on one device."""
    device: str = ""
    """The device on which `compile` runs; "" if nothing runs."""

    @property
    def samples_per_second(self) -> float:
        return self._rate(self.samples)

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self._rate(self.tokens)

    def mfu(self, num_devices: int) -> float:
        """Return the model FLOPs utilization: the share of the devices' peak FLOP/s that model FLOPs take."""
        return self._rate(self.ideal_seconds) / num_devices

    def _rate(self, amount: float) -> float:
        """Return an amount per second; 0 of a step that takes no time."""
        return amount / self.seconds if self.seconds else 0.0


_TEXT, _SECONDS, _COUNT = Text(), Real(0), Whole(0)
WORKLOAD = Record(
    {
        "model": _TEXT,
        "num_parameters": _COUNT,
        "inputs": Table(_TEXT),
        "microbatches": Whole(1),
        "samples": _COUNT,
        "tokens": Maybe(_COUNT),
        "parameters": _TEXT,
        "compute": _TEXT,
        "optimizer": _TEXT,
        "seconds": _SECONDS,
        "flops": _SECONDS,
        "ideal_seconds": _SECONDS,
        "one_device": Record(
            {"seconds": _SECONDS, "num_bytes": _COUNT, "capacity": _COUNT}, optional={"reserved_bytes": _COUNT}
        ),
        "device": _TEXT,
    }
)
"""The JSON of a workload."""


def workload_of(values: Mapping[str, Any] | None) -> Workload | None:
    """Return the workload of JSON that agrees with `WORKLOAD`."""
    if values is None:
        return None
    return Workload(**{**values, "one_device": OneDevice(**values["one_device"])})
