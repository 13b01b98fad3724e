"""The network between nodes: cards of a node, leaf switches, rails, and a spine with less than all their bandwidth.

    bytes per second of a device    those of a card · cards of a node / devices of a node
    nodes below a leaf switch       its cards, if each card of a node has a leaf switch of its own (rail-optimized);
                                    its cards / cards of a node, if all cards of a node share one
    bytes per second beyond these   those of a device / oversubscription of the spine

A link with a network becomes two, that below the leaf switches and that over the spine, and collectives are priced by
their levels as on any links (`costs.hardware.collectives`). On rails an exchange among all devices stays below the leaf
switches of its nodes, too, as NCCL (2.12 and later) hands data over NVLink to the device on the rail of the receiver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from autopar.costs.hardware.profile import Link
from autopar.errors import PlanError


@dataclass(frozen=True, slots=True)
class Network:
    """Network on a profile's last link; the defaults change nothing."""

    nics_per_node: int = 0
    """Network cards of a node, of which the link's `bytes_per_s` is that of one; 0: one for each device."""
    leaf_nics: int = 0
    """Cards that one leaf switch joins; 0: not stated, and nothing crosses a spine."""
    rail_optimized: bool = False
    """True if the cards of a node, one of each rail, go to different leaf switches; False if they share one."""
    spine_oversubscription: float = 1.0
    """Bandwidth of the cards below a leaf switch over that from it to the spine."""

    def __post_init__(self) -> None:
        for name in ("nics_per_node", "leaf_nics"):
            if getattr(self, name) < 0:
                raise PlanError(
                    f"network.{name} is {getattr(self, name)}; give a number of cards, or 0 for not stated."
                )
        if not 1 <= self.spine_oversubscription < math.inf:
            raise PlanError(
                f"network.spine_oversubscription is {self.spine_oversubscription}; give 1 for full bandwidth, or more."
            )
        if (self.rail_optimized or self.spine_oversubscription > 1) and not self.leaf_nics:
            field = "rail_optimized" if self.rail_optimized else "spine_oversubscription"
            raise PlanError(
                f"network.{field} needs network.leaf_nics, the cards that one leaf switch joins; give that."
            )

    def links(self, link: Link, node_devices: int) -> tuple[Link, ...]:
        """Return the links that a last link of nodes with so many devices stands for, innermost first.

        Raises PlanError if a leaf switch has fewer cards than the nodes below it need, or the link is not the last.
        """
        if link.devices is not None:
            raise PlanError(
                f"link {link.name!r} joins {link.devices} devices and has a network; state it for the last link, which "
                "joins any number (null)."
            )
        nics = self.nics_per_node or node_devices
        each = _changed(link, bytes_per_s=link.bytes_per_s * nics / node_devices)
        if self.spine_oversubscription == 1:
            return (each,)
        nodes = self.leaf_nics if self.rail_optimized else self.leaf_nics // nics
        if not nodes:
            raise PlanError(
                f"network.leaf_nics is {self.leaf_nics}, and a node has {nics} cards on one leaf switch; give at least "
                f"{nics}, or rail_optimized if its cards go to different ones."
            )
        spine = _changed(each, bytes_per_s=each.bytes_per_s / self.spine_oversubscription)
        if nodes == 1:
            return (spine,)
        return _changed(each, devices=nodes * node_devices), _changed(spine, name=f"{link.name} spine")


def _changed(link: Link, **changes: Any) -> Link:
    """Return a link with other fields; a latency stands for the protocol that a link makes of it."""
    return replace(link, protocols=() if link.latency_s else link.protocols, **changes)
