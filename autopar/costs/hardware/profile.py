"""Machine profiles of the planner: peak FLOP/s, memory, and the links between devices, read from JSON files.

A profile in `profiles/` states every number as {"value": …, "source": …}. Sources say "datasheet", "measured" (with
hardware, date and script), "fit" (with script, date and data), "derived" or "assumed". A user's own profile is the same
kind of file anywhere, given by its path; `autopar calibrate` writes one. `collectives` defines what the numbers of a
link mean for a collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from autopar.costs.hardware.reserved import Reserved
from autopar.errors import PlanError

ALGORITHMS = ("ring", "tree")
RESERVED = ("allocator_factor", "context_bytes", "communicator_bytes", "workspace_bytes")
"""Numbers of a profile that say what a device holds besides tensors."""
HOST = ("host_link_bytes_per_s", "host_memory_bytes_per_s", "host_memory_bytes", "host_devices")
"""Numbers of a profile that say what a device's host is."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to carry an algorithm's messages over a link: cheap to start, or good for the bandwidth.

    A collective pays `base_latency_s` once and `step_latency_s` for each step over the link, and moves its bytes at
    `efficiency` times the link's bandwidth. NCCL's are LL, LL128 and Simple.
    """

    name: str
    """Name of the protocol, as NCCL's "LL"."""
    algorithm: str = "ring"
    """Algorithm that it carries: "ring" or "tree"."""
    base_latency_s: float = 0.0
    """Seconds of each collective."""
    step_latency_s: float = 0.0
    """Seconds of each step over the link."""
    efficiency: float = 1.0
    """Share of the link's bandwidth."""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise PlanError(
                f"protocol {self.name!r} is of algorithm {self.algorithm!r}; use one of {', '.join(ALGORITHMS)}."
            )
        for what, seconds in (("base", self.base_latency_s), ("step", self.step_latency_s)):
            if not 0 <= seconds < math.inf:
                raise PlanError(f"protocol {self} has a {what} latency of {seconds} s; give seconds of at least 0.")
        if not 0 < self.efficiency <= 1:
            raise PlanError(f"protocol {self} has an efficiency of {self.efficiency}; give a share above 0, at most 1.")

    def __str__(self) -> str:
        return f"{self.algorithm}/{self.name}"


@dataclass(frozen=True, slots=True)
class _PerCollective:
    """A factor for each collective."""

    all_reduce: float = 1.0
    all_gather: float = 1.0
    reduce_scatter: float = 1.0
    all_to_all: float = 1.0


@dataclass(frozen=True, slots=True)
class Efficiencies(_PerCollective):
    """Share of a link's bandwidth that each collective reaches, by any protocol: libraries run some of them poorly."""

    def __post_init__(self) -> None:
        for field in fields(self):
            share = getattr(self, field.name)
            if not 0 < share <= 1:
                raise PlanError(f"efficiencies.{field.name} is {share}; give a share above 0, at most 1.")


@dataclass(frozen=True, slots=True)
class Latencies(_PerCollective):
    """Times the latency of a protocol that each collective takes to start: libraries make them in different ways."""

    def __post_init__(self) -> None:
        for field in fields(self):
            factor = getattr(self, field.name)
            if not 0 <= factor < math.inf:
                raise PlanError(f"latencies.{field.name} is {factor}; give a number of at least 0.")


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network: it joins groups of `devices` consecutive devices (None: any number).

    `bytes_per_s` is what one device can send over it per second while it receives as much. A link is given its
    `protocols`, or a latency per message, which stands for one ring protocol of full efficiency.
    """

    name: str
    """Name of the link, as "NVLink"."""
    devices: int | None
    """Consecutive devices that it joins; None (null): any number."""
    latency_s: float
    """Seconds of a message, of a link without protocols."""
    bytes_per_s: float
    """Bytes that one device sends per second while it receives as many."""
    protocols: tuple[Protocol, ...] = ()
    """Protocols that collectives choose from."""
    efficiencies: Efficiencies = Efficiencies()
    """Collective → the share of the bandwidth that it reaches by any protocol; 1 if not stated."""
    latencies: Latencies = Latencies()
    """Collective → the factor on the latencies of protocols; 1 if not stated."""
    straggling_s: float = 0.0
    """Seconds of the host for each collective of activations, which is waited for, and each further block that the link
    joins to its group: the slowest is the later, the more there are. Hidden, as launches, where hosts are ahead."""

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise PlanError(f"link {self.name!r} joins {self.devices} devices; give at least 1, or null for any.")
        if not 0 <= self.latency_s < math.inf:
            raise PlanError(f"link {self.name!r} has a latency of {self.latency_s} s; give seconds of at least 0.")
        if not 0 <= self.straggling_s < math.inf:
            raise PlanError(
                f"link {self.name!r} has a straggling_s of {self.straggling_s}; give seconds of at least 0."
            )
        if not 0 < self.bytes_per_s < math.inf:
            raise PlanError(f"link {self.name!r} moves {self.bytes_per_s} bytes/s; give a number above 0.")
        if not self.protocols:
            object.__setattr__(self, "protocols", (Protocol("messages", "ring", self.latency_s),))
        elif self.latency_s:
            raise PlanError(f"link {self.name!r} has protocols and a latency of its own; leave latency_s out.")
        names = [str(protocol) for protocol in self.protocols]
        if len(set(names)) < len(names):
            raise PlanError(f"link {self.name!r} has the protocols {', '.join(names)}; give each once.")

    def protocol(self, algorithm: str, name: str) -> Protocol | None:
        """Return the protocol of that algorithm and name, None where the link lacks it."""
        return next((p for p in self.protocols if (p.algorithm, p.name) == (algorithm, name)), None)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device and the links that join many of them, innermost first."""

    name: str
    """Name of the profile."""
    flops: Mapping[str, float]
    """dtype name, as in "bfloat16" → peak FLOP/s of a dense matmul."""
    memory_bytes_per_s: float
    """Bandwidth of the device's memory."""
    memory_bytes: int
    """Memory of the device."""
    op_latency_s: float
    """Seconds that any operation takes, however small."""
    links: tuple[Link, ...]
    """Links between devices, innermost first."""
    elementwise_bytes_per_s: float = 0.0
    """Bandwidth of differentiated operations that are not contractions.

    0 means `memory_bytes_per_s`, for machines on which memory bounds these operations.
    """
    product_bytes_per_s: float = 0.0
    """Bandwidth of differentiated products of few rows, which read a whole matrix; 0 means `memory_bytes_per_s`."""
    attention_efficiency: float = 1.0
    """Times a large product's FLOP/s that fused attention reaches with large heads, differentiated."""
    launch_s: float = 0.0
    """Seconds of the host for each call that it launches, ahead of the device; 0: the device is the host."""
    collective_check_s: float = 0.0
    """Seconds of the host for each rank of a collective's group, to check that all ranks issue the same collective, as
    with TORCH_DISTRIBUTED_DEBUG=DETAIL; 0: nothing is checked."""
    dtensor_s: float = 0.0
    """Seconds of the host for each parameter that is a DTensor in an optimizer's step, beyond those of a plain one."""
    communication_share: float = 1.0
    """Share of the device that a running collective takes from overlapped compute; 1: overlap gains nothing."""
    product_efficiency: float = 1.0
    """Share of the peak FLOP/s that large products reach, differentiated; 1: the peak was measured so."""
    product_wave: float = 0.0
    """Elements of a product's output that the device makes at once; 0: one by one.

    Source: `costs.pricing.product_efficiency`.
    """
    product_unaligned: float = 1.0
    """Share of their rate that batches of products reach whose rows are no multiple of 16 bytes; 1: all of it."""
    attention_length: float = 0.0
    """Queries at which fused attention under a causal mask reaches half of its share; 0: it does not depend on them."""
    attention_head: float = 0.0
    """Features of a head at which fused attention reaches half of its share; 0: it does not depend on them."""
    host_link_bytes_per_s: float = 0.0
    """Between a device and its host, in each direction; 0 (as for the two below): unspecified, no offload."""
    host_memory_bytes_per_s: float = 0.0
    """Read plus written by the host, whose devices share it where they all step there."""
    host_memory_bytes: int = 0
    """Memory bytes of the host; 0 if not stated, and then not limited."""
    host_devices: int = 0
    """Devices that share a host; 0: as many as there are."""
    allocator_factor: float = 1.0
    """Bytes that the caching allocator reserves for each byte of tensors at the peak."""
    context_bytes: int = 0
    """Memory of a device that the context and the kernels of libraries take."""
    communicator_bytes: int = 0
    """Buffers of one communicator (NCCL)."""
    workspace_bytes: int = 0
    """Workspaces of libraries of products (cuBLAS), forward and backward."""

    def __post_init__(self) -> None:
        for name in ("elementwise_bytes_per_s", "product_bytes_per_s"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.memory_bytes_per_s)
        numbers = {f"flops of {dtype}": value for dtype, value in self.flops.items()}
        numbers |= {"memory_bytes_per_s": self.memory_bytes_per_s, "memory_bytes": self.memory_bytes}
        numbers |= {
            "elementwise_bytes_per_s": self.elementwise_bytes_per_s,
            "product_bytes_per_s": self.product_bytes_per_s,
        }
        for what, value in numbers.items():
            if not 0 < value < math.inf:
                raise PlanError(f"hardware {self.name!r} has {what} = {value}; give a number above 0.")
        if "float32" not in self.flops:
            raise PlanError(f"hardware {self.name!r} has no flops for float32, to which other dtypes fall back.")
        for name in ("product_efficiency", "product_unaligned"):
            if not 0 < getattr(self, name) <= 1:
                raise PlanError(
                    f"hardware {self.name!r} has {name} = {getattr(self, name)}; give a share above 0, at most 1."
                )
        if not 0 < self.attention_efficiency * self.product_efficiency <= 1:
            raise PlanError(
                f"hardware {self.name!r} has attention_efficiency = {self.attention_efficiency}; times "
                f"product_efficiency = {self.product_efficiency} it is a share of the peak, above 0, at most 1."
            )
        for name in (
            "op_latency_s",
            "launch_s",
            "collective_check_s",
            "dtensor_s",
            "product_wave",
            "attention_length",
            "attention_head",
            *HOST,
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"hardware {self.name!r} has {name} = {getattr(self, name)}; give at least 0.")
        if not 0 <= self.communication_share <= 1:
            raise PlanError(
                f"hardware {self.name!r} has communication_share = {self.communication_share}; give a share, from 0 to "
                "1."
            )
        Reserved(*(getattr(self, name) for name in RESERVED))
        self._check_links()

    def _check_links(self) -> None:
        if not self.links or self.links[-1].devices is not None:
            raise PlanError(f"hardware {self.name!r} needs a last link that joins any number of devices (null).")
        inner = [link.devices for link in self.links[:-1]]
        sizes = [devices for devices in inner if devices is not None]
        nested = all(small < large and large % small == 0 for small, large in itertools.pairwise(sizes))
        if len(sizes) < len(inner) or not nested:
            raise PlanError(
                f"hardware {self.name!r} has links of {inner} devices; list them innermost first, each a multiple of "
                f"the one before."
            )
        rings = [{p.name for p in link.protocols if p.algorithm == "ring"} for link in self.links]
        if not set.intersection(*rings):
            raise PlanError(
                f"hardware {self.name!r} has no ring protocol that all of its links know, found "
                f"{[sorted(names) for names in rings]}; a collective over several links needs one of the same name."
            )

    def __hash__(self) -> int:
        # Hashed for every transfer that is priced: few numbers, as hardware that differs in the rest is rare.
        return hash((self.name, self.memory_bytes_per_s, self.memory_bytes, self.op_latency_s, len(self.links)))

    @property
    def is_host(self) -> bool:
        """True if the device is the host itself."""
        return self.launch_s == 0

    def devices_on_host(self, num_devices: int) -> int:
        """Return how many of `num_devices` devices share one host."""
        return min(self.host_devices or num_devices, num_devices)

    def flops_of(self, dtype: object) -> float:
        """Return peak FLOP/s of a torch dtype or a dtype's name; those the profile does not list compute as float32."""
        return self.flops.get(dtype_name(dtype), self.flops["float32"])


def dtype_name(dtype: object) -> str:
    """Return the name of a torch dtype as profiles have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
