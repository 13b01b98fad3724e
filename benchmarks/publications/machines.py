"""Differences of a source's machine and framework from the profile of its devices, as numbers of a profile.

    BLOOM         a node's cards carry 400 Gb/s; the framework is vTrain's
    vTrain        a node's cards carry 800 Gb/s, as its README says: 12.5 GB/s a device
    llm-foundry   attention by the Triton kernels of FlashAttention, with ALiBi, not by FlashAttention-2 (the variant
                  "triton" of a profile)
    nanotron      one cluster in two ways, told apart by the bandwidth of the run's own all-reduce in a node: below
                  440 GB/s PyTorch checks collectives (the variant "debug" of a profile), and below 100 GB/s there is no
                  NVLink besides, and messages between stages begin late. Other runs are the profile's
    NeMo          products by cuBLAS and attention by cuDNN on H100s, in Transformer Engine's modules (the variant "te")

Fitted numbers are those of `benchmarks.fit_profiles`, which prints them with their cross-validated errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from autopar.costs.hardware.profile import Hardware, Link
from benchmarks.publications.rows import Row

VTRAIN_BYTES_PER_S = 800e9 / 8 / 8  # of each of a node's eight devices
BLOOM_BYTES_PER_S = 400e9 / 8 / 8  # of each of a node's eight devices, which share four cards of 100 Gb/s
NVLINK = 100e9  # bytes/s of an all-reduce in a node: 13 runs that ended reach 45 GB/s, all others 390 or more
UNCHECKED = 440e9  # bytes/s of an all-reduce in a node: no run of nanotron is within 1% of it


@dataclass(frozen=True, slots=True)
class Machine:
    """Numbers of a hardware profile that differ on a machine."""

    network_bytes_per_s: float = inf
    """Upper bound on the bandwidth of the outermost link, in bytes/s."""
    node_bytes_per_s: float = inf
    """Upper bound on the bandwidth of the link inside a node, in bytes/s."""
    message_s: float = 0.0
    """Seconds in which a message between stages begins; 0: as the links have it."""

    def of(self, profile: Hardware) -> Hardware:
        """The profile of its devices, on this machine."""
        most = self.node_bytes_per_s, self.network_bytes_per_s
        links = tuple(
            self._with_messages(replace(link, bytes_per_s=min(link.bytes_per_s, num_bytes)))
            for link, num_bytes in zip(profile.links, most, strict=True)
        )
        return replace(profile, links=links)

    def _with_messages(self, link: Link) -> Link:
        if not self.message_s:
            return link
        fastest = min(each.base_latency_s + each.step_latency_s for each in link.protocols if each.algorithm == "ring")
        return replace(link, latencies=replace(link.latencies, all_to_all=self.message_s / fastest))


CHECKED, WITHOUT_NVLINK = "nanotron, checked", "nanotron, no NVLink"
"""Machines on which collectives are checked."""
NEMO_ON_H100 = "nemotron4, H100"
VARIANTS = {CHECKED: ":debug", WITHOUT_NVLINK: ":debug", "llm-foundry": ":triton", NEMO_ON_H100: ":te"}
"""The variants of profiles by which machines ran."""
MACHINES = {
    "vtrain several nodes": Machine(network_bytes_per_s=VTRAIN_BYTES_PER_S),
    "bloom": Machine(network_bytes_per_s=BLOOM_BYTES_PER_S),
    WITHOUT_NVLINK: Machine(node_bytes_per_s=45e9, message_s=0.5),
}
"""measured: networks are as sources say. Without NVLink all 13 runs are on pipelines. A slot of the step of those that
have a plan takes 0.5 s to 0.6 s more than is predicted of two stages, 0.7 s to 0.9 s of four and eight, whatever the
model and the message: messages begin after 0.5 s, by the runs of 3.6B parameters (0.51 s) as by those of 8.9B."""


def machine_name(row: Row) -> str:
    """The machine that a row ran on, where it is told apart."""
    if row.source == "nanotron":
        reached = row.bandwidths.get("intra_all_reduce", inf)
        checked = CHECKED if reached > NVLINK else WITHOUT_NVLINK
        return "nanotron" if reached > UNCHECKED else checked
    if row.source == "nemotron4" and row.device.startswith("h100"):
        return NEMO_ON_H100
    return row.source


def variant_of(row: Row) -> str:
    """Return the suffix of the profile by which a row ran."""
    return VARIANTS.get(machine_name(row), "")


def hardware_of(row: Row, profile: Hardware) -> Hardware:
    """The profile of a row's devices, in the variant of the row, with what its machine and framework differ in."""
    return MACHINES.get(machine_name(row), Machine()).of(profile)
