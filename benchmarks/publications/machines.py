"""What a source's machine and framework differ in from the profile of its devices: numbers that a profile may hold.

    BLOOM         a node's cards carry 400 Gb/s; the framework is vTrain's
    vTrain        a node's cards carry 800 Gb/s, as its README says: 12.5 GB/s a device
    llm-foundry   attention by the Triton kernels of FlashAttention, with ALiBi, not by FlashAttention-2
    nanotron      one cluster in states, told apart by the bandwidth of the run's own all-reduce in a node: below
                  440 GB/s hosts come late to collectives, and below 100 GB/s there is no NVLink, and messages
                  between stages begin late. Its other runs are the profile's: those of the h100 are fitted to them

Fitted numbers are those of `benchmarks.fit_profiles`, which prints them with their cross-validated errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from autopar.hardware.profile import Hardware, Link
from benchmarks.publications.rows import Row

VTRAIN_BYTES_PER_S = 800e9 / 8 / 8  # of each of a node's eight devices
BLOOM_BYTES_PER_S = 400e9 / 8 / 8  # of each of a node's eight devices, which share four cards of 100 Gb/s
NVLINK = 100e9  # bytes/s of an all-reduce in a node: 13 runs that ended reach 45 GB/s, all others 390 or more
UNDISTURBED = 440e9  # bytes/s of an all-reduce in a node: no run of nanotron is within 1% of it


@dataclass(frozen=True, slots=True)
class Machine:
    """What is replaced in a profile."""

    launch_s: float | None = None
    straggling_s: tuple[float, float] | None = None
    """For each further device of a node, and for each further node; None: the profile's."""
    network_bytes_per_s: float = inf
    """Of the outermost link, where that carries more."""
    network_latency: float = 1.0
    """Times the latency of a step over it."""
    gathered: float = 1.0
    """Share of the network that gathers and reduce-scatters reach, which no switch or tree makes shorter."""
    node_bytes_per_s: float = inf
    """Of the link in a node, where that carries more."""
    message_s: float = 0.0
    """Seconds in which a message between stages begins; 0: as the links have it."""
    attention: float = 1.0
    """Share of the profile's rate of attention that the framework's kernels reach."""

    def of(self, profile: Hardware) -> Hardware:
        """The profile of its devices, on this machine."""
        node, network = profile.links
        num_bytes = min(node.bytes_per_s, self.node_bytes_per_s)
        late = (node.straggling_s, network.straggling_s) if self.straggling_s is None else self.straggling_s
        links = replace(node, bytes_per_s=num_bytes, straggling_s=late[0]), self._network(network, late[1])
        launch = profile.launch_s if self.launch_s is None else self.launch_s
        attention = profile.attention_efficiency * self.attention
        links = tuple(map(self._with_messages, links))
        return replace(profile, launch_s=launch, attention_efficiency=attention, links=links)

    def _with_messages(self, link: Link) -> Link:
        if not self.message_s:
            return link
        fastest = min(each.base_latency_s + each.step_latency_s for each in link.protocols if each.algorithm == "ring")
        return replace(link, latencies=replace(link.latencies, all_to_all=self.message_s / fastest))

    def _network(self, link: Link, late: float) -> Link:
        protocols = tuple(
            replace(each, step_latency_s=each.step_latency_s * self.network_latency) for each in link.protocols
        )
        num_bytes = min(link.bytes_per_s, self.network_bytes_per_s)
        of_all = link.efficiencies
        gathered, scattered = (each * self.gathered for each in (of_all.all_gather, of_all.reduce_scatter))
        share = replace(of_all, all_gather=gathered, reduce_scatter=scattered)
        return replace(link, bytes_per_s=num_bytes, protocols=protocols, straggling_s=late, efficiencies=share)


LATE = Machine(6.6e-5, (4.7e-4, 3.9e-3), 24e9, 11.5, gathered=1.9)
MACHINES = {
    "vtrain several nodes": Machine(network_bytes_per_s=VTRAIN_BYTES_PER_S),
    "bloom": Machine(network_bytes_per_s=BLOOM_BYTES_PER_S),
    "llm-foundry": Machine(attention=0.57),
    "nanotron, late hosts": LATE,
    "nanotron, no NVLink": replace(LATE, node_bytes_per_s=45e9, message_s=0.5),
}
"""measured: fits of benchmarks/results/2026-11-24-profiles.txt and 2026-11-28-profiles.txt; networks are as sources
say. Late hosts were fitted earlier, to a network of 18 GB/s for all collectives, with launches of 66 us, which they
hide, and to plans of which eight collectives of a layer wait for them; six do, as others run beside products, with 4/3
of the lateness each. Without NVLink all 13 runs are on pipelines. A slot of the step of those that have a plan takes
0.5 s to 0.6 s more than is predicted of two stages, 0.7 s to 0.9 s of four and eight, whatever the model and the
message: messages begin after 0.5 s, by the runs of 3.6B parameters (0.51 s) as by those of 8.9B (0.51 s). The share of
the Triton kernels is the same on H100s and A100s, by long sequences of both (0.58 and 0.57)."""


def machine_name(row: Row) -> str:
    """The machine that a row ran on, where it is told apart."""
    if row.source == "nanotron":
        reached = row.bandwidths.get("intra_all_reduce", inf)
        late = "nanotron, late hosts" if reached > NVLINK else "nanotron, no NVLink"
        return "nanotron" if reached > UNDISTURBED else late
    return row.source


def hardware_of(row: Row, profile: Hardware) -> Hardware:
    """The profile of a row's devices with what its machine and framework differ in."""
    return MACHINES.get(machine_name(row), Machine()).of(profile)
