"""Seconds of a collective over one mesh axis, or several joined ones, from the links that its groups run over.

    seconds = min over algorithms and protocols of  latency + bytes · seconds_per_byte      (a piece each)

after the model by which NCCL chooses among its own (src/graph/tuning.cc): a protocol that starts fast moves few bytes
per second (LL), another the reverse (Simple), so how efficient a message is follows from its size. NCCL's corrections
for trees of middling sizes, its in-switch reductions and its overhead of posting to a network card are left out.

Where a group lies. The mesh's last axis is on neighbouring devices: an axis of n devices has a stride, the product of
the later axes, and a span of stride · n devices. A mesh uses u devices of each block of a link (`used_devices`), which
hold g = gcd(u, span) / stride of a group's members (1 where that is no whole number: the members are then taken to lie
apart). Joined axes that follow each other are as one axis, and those that do not have the product of their g. From
innermost to outermost, g₀ = 1 | g₁ | … | n; level ℓ joins the blocks of g_ℓ members to blocks of g_ℓ₊₁, and counts
where g_ℓ < g_ℓ₊₁.

Devices used of a block. Of D devices that a link joins, a mesh uses all if its devices fill whole blocks. Otherwise no
launcher can fill all of them, and each gives the same number of devices: the largest that the mesh's axes nest in, so
that an axis that fits in a block lies in one. A mesh of 256 devices uses 64 of the 72 GPUs of an NVLink domain, one of
144 devices all 72.

Bandwidth. All members of a block reach beyond it together, each over its own port, in g_ℓ rings of which each carries
1/g_ℓ of the bytes. So level ℓ gives a ring g_ℓ · efficiency_ℓ · bytes_per_s_ℓ, and the slowest level bounds it: 8 GPUs
of a node, each with a card of 50 GB/s, send 400 GB/s to the next node, or what NVLink carries if that is less.

    algorithm   for                          steps over level ℓ                     bytes over a port, per byte
    ring        all_gather, reduce_scatter   n/g_ℓ - n/g_ℓ₊₁                        (n-1)/n / g_ℓ
    ring        all_reduce                   twice that                             2 (n-1)/n / g_ℓ
    tree        all_reduce                   2 (r - 1) in a node, 2 ⌈log₂ r⌉ else   2 / g_ℓ,  r = g_ℓ₊₁ / g_ℓ
    messages    all_to_all                   g_ℓ₊₁ - g_ℓ                            (n - g_ℓ)/n
    messages    permute                      1 over the outermost, else 0           1

where efficiency_ℓ is the protocol's, times what the link's `efficiencies` say of the collective (NCCL: no difference);
its latency is the protocol's, times what the link's `latencies` say of it.
The steps of a ring pass add up to n - 1. In an all_to_all each device sends to its peers alone: the (n - g_ℓ)/n that
leave its block take its own port, one message to each peer, by the protocols of the ring. In a permute each sends all
that it has to the next one; what the links say of an all_to_all holds for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from autopar.costs.hardware.overlap import Message, kind_of
from autopar.costs.hardware.profile import Hardware, Link
from autopar.ir.sharding.mesh import Mesh

Bytes = TypeVar("Bytes", int, float, np.ndarray)
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Passes around the ring; the other collectives are of messages."""
MESSAGES = ("all_to_all", "permute")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective over one mesh axis, or joined ones ("dp_tp").

    `num_bytes` follows NCCL's convention (see `operation.Collective`).
    """

    collective: str
    axis: str
    num_bytes: int
    backward: bool = False
    packed: int = 0
    """Bytes that the device reads and writes to bring the message into order before it (`ir.sharding.rearranged`)."""
    unpacked: int = 0
    """The same behind it."""
    ahead: bool = False
    """True if it begins long before its result is needed: it overlaps with compute, and waits for no host."""
    unpadded: int | None = None
    """As in `operation.Collective`."""

    @property
    def priced_bytes(self) -> int:
        """Bytes by which its seconds are priced."""
        return self.num_bytes if self.unpadded is None else self.unpadded


@dataclass(frozen=True, slots=True)
class Level:
    """A link that joins blocks of `inner` members of a group to blocks of `outer` members."""

    link: Link
    inner: int
    outer: int
    in_node: bool


def transfer_seconds(transfer: Transfer, mesh: Mesh, hardware: Hardware, message: Message | None = None) -> float:
    """Return the seconds of one transfer, and of one in a message those of its part in it that no computation hides.

    With one that runs alone goes what the device rearranges, and the wait for the last host; in messages a layer's
    weights are packed together.
    """
    collective, axis, num_bytes = transfer.collective, transfer.axis, transfer.priced_bytes
    if message is None:
        alone = float(collective_seconds(collective, num_bytes, mesh, axis, hardware))
        if transfer.ahead:
            return hardware.communication_share * alone
        return alone + rearranging_seconds(transfer, hardware) + lateness(mesh, axis, hardware)
    together = message.num_parameters

    def seconds(num_bytes: float) -> float:
        return float(collective_seconds(collective, num_bytes * together, mesh, axis, hardware)) / together

    share = message.waited(kind_of(collective, axis, transfer.backward))
    if share is not None:
        return share * seconds(num_bytes)
    average = seconds(message.average(collective, num_bytes))
    return message.exposed(collective, average, mesh.num_devices, hardware.communication_share) * seconds(num_bytes)


@functools.lru_cache(maxsize=4096)
def lateness(mesh: Mesh, axis: str, hardware: Hardware) -> float:
    """Return the seconds by which the slowest host of a group on an axis is late: those of every further block of each
    level.
    """
    levels = levels_of(hardware.links, mesh, axis)
    return sum((level.outer // level.inner - 1) * level.link.straggling_s for level in levels)


def rearranging_seconds(transfer: Transfer, hardware: Hardware) -> float:
    """Return the seconds in which the device brings messages of a transfer into order, before and behind it."""
    return sum(map(functools.partial(copy_seconds, hardware=hardware), (transfer.packed, transfer.unpacked)))


def copy_seconds(num_bytes: int, hardware: Hardware) -> float:
    """Return the seconds of one copy that reads and writes so many bytes."""
    return num_bytes / hardware.memory_bytes_per_s + hardware.op_latency_s if num_bytes else 0.0


def ports_used(transfer: Transfer, mesh: Mesh, hardware: Hardware) -> tuple[tuple[str, float], ...]:
    """Return the links that a collective loads, by name, each with the share of a device's port that it takes alone.

    Latency loads no port. Traffic over an outer link of the network passes the ports of those within.
    """
    ways = _best_ways(transfer.collective, mesh, transfer.axis, hardware)
    best = min(ways, key=lambda way: way.latency + way.seconds_per_byte * transfer.num_bytes)
    seconds = best.latency + best.seconds_per_byte * transfer.num_bytes
    return tuple((name, each * transfer.num_bytes / seconds) for name, each in best.ports) if seconds else ()


def collective_seconds(collective: str, num_bytes: Bytes, mesh: Mesh, axis: str, hardware: Hardware) -> Bytes | float:
    """Return the seconds of a collective of `num_bytes`, a number or an array of them: the least of its `pieces`."""
    times = [
        latency + seconds_per_byte * num_bytes for latency, seconds_per_byte in pieces(collective, mesh, axis, hardware)
    ]
    return functools.reduce(np.minimum, times) if isinstance(num_bytes, np.ndarray) else min(times)


class Way(NamedTuple):
    """An algorithm with a protocol: latency in seconds, seconds per byte, and those of each link's port per byte."""

    latency: float
    seconds_per_byte: float
    ports: tuple[tuple[str, float], ...] = ()


@functools.lru_cache(maxsize=4096)
def pieces(collective: str, mesh: Mesh, axis: str, hardware: Hardware) -> tuple[tuple[float, float], ...]:
    """Return (latency in seconds, seconds per byte) of every way that is best for some size, by growing latency."""
    return tuple((way.latency, way.seconds_per_byte) for way in _best_ways(collective, mesh, axis, hardware))


@functools.lru_cache(maxsize=4096)
def _best_ways(collective: str, mesh: Mesh, axis: str, hardware: Hardware) -> tuple[Way, ...]:
    best: list[Way] = []
    for way in sorted(_all_ways(collective, mesh, axis, hardware)):
        if not best or way.seconds_per_byte < best[-1].seconds_per_byte:
            best.append(way)
    return tuple(best)


def _all_ways(collective: str, mesh: Mesh, axis: str, hardware: Hardware) -> list[Way]:
    levels = levels_of(hardware.links, mesh, axis)
    if not levels:
        return [Way(0.0, 0.0)]
    within = [link for number, link in enumerate(hardware.links) if number or link.devices is None]
    return [way for algorithm in _algorithms(collective) for way in _ways(collective, algorithm, levels, within)]


def message_seconds(num_bytes: int, mesh: Mesh, axis: str, hardware: Hardware) -> float:
    """Return the seconds of a message of each device to its neighbour on `axis`, over the outermost link that joins
    neighbours.

    A message is one step of the ring; what the link's factors say of all_to_all, which is messages too, holds for it.
    """
    return _message(num_bytes, mesh, axis, hardware)[0]


def message_ports(num_bytes: int, mesh: Mesh, axis: str, hardware: Hardware) -> tuple[tuple[str, float], ...]:
    """Return the links that such a message loads, by name, each with the share of a device's port that it takes alone.

    A message over an outer link of the network passes the ports of those within.
    """
    return _message(num_bytes, mesh, axis, hardware)[1]


def _message(num_bytes: int, mesh: Mesh, axis: str, hardware: Hardware) -> tuple[float, tuple[tuple[str, float], ...]]:
    levels = levels_of(hardware.links, mesh, axis)
    if not levels:
        return 0.0, ()
    level, ways = levels[-1], []
    network = [link for number, link in enumerate(hardware.links) if number or link.devices is None]
    crossed = [level.link] if level.in_node else network[: network.index(level.link) + 1]
    for protocol in level.link.protocols:
        if protocol.algorithm != "ring":
            continue
        latency = (protocol.base_latency_s + protocol.step_latency_s) * level.link.latencies.all_to_all
        ports = {}
        for link in crossed:
            own = link.protocol("ring", protocol.name) or protocol
            ports[link.name] = num_bytes / (own.efficiency * link.efficiencies.all_to_all * link.bytes_per_s)
        ways.append((latency + ports[level.link.name], tuple(ports.items())))
    seconds, ports = min(ways)
    return seconds, tuple((name, each / seconds) for name, each in ports) if seconds else ()


def levels_of(links: Sequence[Link], mesh: Mesh, axis: str) -> tuple[Level, ...]:
    """Return the links that the groups of `axis` run over, innermost first; none for an axis of one device."""
    lines = _lines(mesh, mesh.positions(axis))
    found, inner = [], 1
    for number, (link, used) in enumerate(zip(links, used_devices(links, mesh), strict=True)):
        outer = math.prod(_members(used, stride, span) for stride, span in lines)
        if outer > inner:
            found.append(Level(link, inner, outer, in_node=number == 0 and link.devices is not None))
            inner = outer
    return tuple(found)


def used_devices(links: Sequence[Link], mesh: Mesh) -> tuple[int, ...]:
    """Return how many devices of each block of every link the mesh uses, innermost first.

    If the mesh does not fill whole blocks, each gives the most devices that nest in the mesh: every span of its last
    axes divides that number, or is a multiple of it.

    Example:
        >>> links = Link("NVLink", 72, 0.0, 9e11), Link("InfiniBand", None, 0.0, 5e10)
        >>> used_devices(links, Mesh({"dp": 4, "ep": 64})), used_devices(links, Mesh({"dp": 3, "ep": 32}))
        ((64, 256), (32, 96))
    """
    spans = [math.prod(mesh.sizes[position:]) for position in range(mesh.ndim, -1, -1)]
    found, used = [], 1
    for link in links:
        most = mesh.num_devices if link.devices is None else min(link.devices, mesh.num_devices)
        if mesh.num_devices % most == 0:
            used = most
        else:
            # The blocks of the link before lie whole in those of this one.
            nested = [used, *(span for span in spans if span % used == 0)]
            inner = max(span for span in nested if span <= most)
            outer = min(span for span in nested if span > most)
            used = inner * max(part for part in range(1, most // inner + 1) if outer // inner % part == 0)
        found.append(used)
    return tuple(found)


def _lines(mesh: Mesh, positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return (stride, span) of some axes, consecutive ones joined."""
    found: list[tuple[int, int]] = []
    for position in positions:
        stride, span = math.prod(mesh.sizes[position + 1 :]), math.prod(mesh.sizes[position:])
        outer = found.pop()[1] if found and found[-1][0] == span else span
        found.append((stride, outer))
    return found


def _members(used: int, stride: int, span: int) -> int:
    """Return how many of a line of devices that are `stride` apart lie in one block of `used` devices."""
    together = math.gcd(used, span)
    return together // stride if together % stride == 0 else 1


def steps_and_share(collective: str, algorithm: str, level: Level, size: int) -> tuple[int, float]:
    """Return steps over a level, and bytes that each member's port carries there per byte of the collective."""
    if collective == "all_to_all":
        return level.outer - level.inner, (size - level.inner) / size
    if collective == "permute":
        return int(level.outer == size), 1.0
    passes = PASSES[collective]
    if algorithm == "ring":
        return passes * (size // level.inner - size // level.outer), passes * (size - 1) / size / level.inner
    blocks = level.outer // level.inner
    # Inside a node NCCL's tree is a chain; only between nodes it branches.
    depth = blocks - 1 if level.in_node else (blocks - 1).bit_length()
    return 2 * depth, 2 / level.inner


def _algorithms(collective: str) -> tuple[str, ...]:
    assert collective in PASSES or collective in MESSAGES, f"no cost for a collective {collective!r}"
    return ("ring", "tree") if collective == "all_reduce" else ("ring",)


def _ways(collective: str, algorithm: str, levels: tuple[Level, ...], network: Sequence[Link]) -> list[Way]:
    """Return one way per protocol of the algorithm that all levels support; `network` are the links beyond a node."""
    size = levels[-1].outer
    latency_name = "all_to_all" if collective in MESSAGES else collective
    found = []
    for name in [p.name for p in levels[0].link.protocols if p.algorithm == algorithm]:
        protocols = [level.link.protocol(algorithm, name) for level in levels]
        known = [protocol for protocol in protocols if protocol is not None]
        if len(known) < len(levels):
            continue
        factors = [getattr(level.link.latencies, latency_name) for level in levels]
        latency = max(protocol.base_latency_s * factor for protocol, factor in zip(known, factors, strict=True))
        ports: dict[str, float] = {}
        for level, protocol, factor in zip(levels, known, factors, strict=True):
            steps, share = steps_and_share(collective, algorithm, level, size)
            latency += steps * protocol.step_latency_s * factor
            crossed = [level.link] if level.in_node else network[: network.index(level.link) + 1]
            for link in crossed:
                own = link.protocol(algorithm, name) or protocol
                seconds = share / (own.efficiency * getattr(link.efficiencies, latency_name) * link.bytes_per_s)
                ports[link.name] = max(ports.get(link.name, 0.0), seconds)
        found.append(Way(latency, max(ports.values()), tuple(ports.items())))
    return found
