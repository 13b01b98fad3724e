"""Cost per parameter element of an optimizer step on the host (`autopar.optim.OffloadedAdamW`).

    down    the gradient, and the weight where there is no master copy      bytes / the link's bandwidth
    host    AdamW goes through gradient, weight and moments; with a master copy the gradient is cast before, and the
            weight behind                                       bytes / the device's share of host memory's bandwidth
    up      the weight                                                      bytes / the link's bandwidth

A GPU's copies overlap with the host's step on other blocks of parameters, and they use host memory bandwidth, too. A
step takes as long as the longest of the three parts. If the device is the host itself, the parts run one after another.
Gradients that are offloaded in the backward (`Optimizer.sends_gradients`) are copied down then, and not in the step. If
the device is the host, their copies still take the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.operations import local_elements
from autopar.costs.pricing.optimizer import MASTER_BYTES, Optimizer
from autopar.errors import PlanError
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.optim.staging import Staged, staging_bytes

STAGING, ACTIVATIONS, GRADIENTS = "staging", "activations", "gradients"
"""Kinds of host memory: a step's staging buffers, activations for the backward, gradients for the step."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """Seconds of an element on its way down, on the host, and on its way up; whether these overlap."""

    before: float
    """Seconds of the gradient's copy to the host, if it is offloaded in the backward."""
    down: float
    host: float
    up: float
    overlapped: bool

    @property
    def seconds(self) -> float:
        """Seconds that the step takes per element.

        The gradient's earlier copy (`before`) is hidden in the backward, and counts only if no parts overlap.
        """
        each = (self.down, self.host, self.up)
        return max(each) if self.overlapped else self.before + sum(each)


def host_step(info: TensorInfo, hardware: Hardware, optimizer: Optimizer) -> HostStep:
    """Return the host-step seconds per parameter element of an optimizer whose state is on the host."""
    assert optimizer.offload is not None, "a step on the device"
    size, master, state = info.dtype.itemsize, optimizer.master_bytes(info), optimizer.state_bytes(info)
    before = size if optimizer.sends_gradients else 0
    down, up = (size if master else 2 * size) - before, size
    cast = size + MASTER_BYTES + MASTER_BYTES + size if master else 0
    stepping = (master or size) * 3 + 2 * state + cast
    overlapped = not hardware.is_host
    if overlapped:
        stepping += down + up
    share = hardware.host_memory_bytes_per_s / optimizer.offload.devices
    link = hardware.host_link_bytes_per_s
    return HostStep(before / link, down / link, stepping / share, up / link, overlapped)


def check_host(hardware: Hardware) -> None:
    """Raise PlanError for a profile by which a step on the host cannot be priced."""
    if not (hardware.host_link_bytes_per_s and hardware.host_memory_bytes_per_s):
        raise PlanError(
            f"hardware {hardware.name!r} does not say how fast its host is, which offload needs: host_link_bytes_per_s "
            f"is {hardware.host_link_bytes_per_s:g}, host_memory_bytes_per_s {hardware.host_memory_bytes_per_s:g}; add "
            "both to the profile, or calibrate again."
        )


def host_bytes(
    parameters: Sequence[tuple[TensorInfo, Layout]], sizes: Sequence[int], optimizer: Optimizer
) -> Mapping[str, int]:
    """Return the bytes of host memory per device by what they are, of parameters in their storage layouts."""
    if optimizer.offload is None:
        return {}
    found: dict[str, int] = {}
    staged = []
    for info, layout in parameters:
        if not info.requires_grad:
            continue
        elements = local_elements(info, layout, sizes)
        staged.append(Staged(elements, info.dtype.itemsize, bool(optimizer.master_bytes(info))))
        for name, size in optimizer.state_of(info).items():
            found[name] = found.get(name, 0) + round(elements * size)
        if optimizer.sends_gradients:
            found[GRADIENTS] = found.get(GRADIENTS, 0) + elements * info.dtype.itemsize
    return {**found, STAGING: staging_bytes(staged)}
