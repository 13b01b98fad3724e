"""The network of a profile: cards of a node, rails, leaf switches, and an oversubscribed spine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.costs.hardware.collectives import Transfer, message_seconds, transfer_seconds
from autopar.costs.hardware.load import PROFILES, load, parse
from autopar.costs.hardware.network import Network
from autopar.costs.hardware.profile import Hardware, Link
from autopar.errors import PlanError
from autopar.ir.sharding.mesh import Mesh

CARD = Link("card", None, 1e-6, 40.0)


def _h100(**network: Any) -> Hardware:
    """The profile of H100s with a network."""
    written = json.loads((PROFILES / "h100.json").read_text())
    written["links"][-1]["network"] = network
    return parse(written)


def _seconds(hardware: Hardware, collective: str, axis: str, **axes: int) -> float:
    return transfer_seconds(Transfer(collective, axis, 10**11), Mesh(axes), hardware)


def test_a_network_of_defaults_changes_no_number() -> None:
    assert _h100() == load("h100") == _h100(nics_per_node=8) == _h100(leaf_nics=32, rail_optimized=True)


def test_devices_share_the_cards_of_their_node() -> None:
    assert Network(nics_per_node=4).links(CARD, 8) == (Link("card", None, 1e-6, 20.0),)
    assert Network(nics_per_node=16).links(CARD, 8) == (Link("card", None, 1e-6, 80.0),)
    half = _seconds(_h100(nics_per_node=4), "all_gather", "dp", dp=4, tp=8)
    assert half == pytest.approx(2 * _seconds(load("h100"), "all_gather", "dp", dp=4, tp=8), rel=0.01)


def test_a_leaf_switch_joins_more_nodes_where_each_rail_has_its_own() -> None:
    specified = {"leaf_nics": 32, "spine_oversubscription": 2.0}
    by_rack, by_rail = (Network(**specified, rail_optimized=rails).links(CARD, 8) for rails in (False, True))
    spine = Link("card spine", None, 1e-6, 20.0)
    assert by_rack == (Link("card", 4 * 8, 1e-6, 40.0), spine)
    assert by_rail == (Link("card", 32 * 8, 1e-6, 40.0), spine)


def test_what_stays_below_a_leaf_switch_takes_no_longer_and_what_crosses_the_spine_does() -> None:
    plain, tight = load("h100"), _h100(leaf_nics=32, spine_oversubscription=4.0)
    rails = _h100(leaf_nics=32, rail_optimized=True, spine_oversubscription=4.0)
    for collective in ("all_gather", "all_reduce", "all_to_all"):
        assert _seconds(tight, collective, "dp", dp=4, tp=8) == _seconds(plain, collective, "dp", dp=4, tp=8)
        assert _seconds(rails, collective, "ep", ep=256) == _seconds(plain, collective, "ep", ep=256)
    # Groups of one device in each leaf: all that they move crosses the spine.
    apart = [_seconds(each, "all_gather", "dp", dp=8, tp=32) for each in (plain, tight)]
    assert apart[1] == pytest.approx(4 * apart[0], rel=0.01)
    assert _seconds(rails, "all_gather", "dp", dp=8, tp=256) > 3 * _seconds(plain, "all_gather", "dp", dp=8, tp=256)
    # An exchange of 256 devices sends 7/8 of its bytes over the spine, and no 31/32 over cards at their full rate.
    exchanged = [_seconds(each, "all_to_all", "ep", ep=256) for each in (plain, tight)]
    assert exchanged[1] == pytest.approx(4 * (7 / 8) / (31 / 32) * exchanged[0], rel=0.02)


def test_a_message_between_stages_far_apart_crosses_the_spine() -> None:
    plain, tight = load("h100"), _h100(leaf_nics=32, spine_oversubscription=4.0)
    near, far = Mesh({"pp": 2, "dp": 8}), Mesh({"pp": 2, "dp": 32})
    assert message_seconds(10**9, near, "pp", tight) == message_seconds(10**9, near, "pp", plain)
    assert message_seconds(10**9, far, "pp", tight) > 3 * message_seconds(10**9, far, "pp", plain)


def test_a_leaf_switch_of_one_node_leaves_the_spine_alone() -> None:
    assert Network(leaf_nics=8, spine_oversubscription=2.0).links(CARD, 8) == (Link("card", None, 1e-6, 20.0),)


def test_a_profile_states_its_network_with_sources(tmp_path: Path) -> None:
    written = json.loads((PROFILES / "h100.json").read_text())
    specified = {"leaf_nics": 32, "rail_optimized": True, "spine_oversubscription": 2}
    written["links"][-1]["network"] = {
        key: {"value": value, "source": "measured: by hand"} for key, value in specified.items()
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(written))
    assert load(path) == _h100(**specified) and [link.devices for link in load(path).links] == [8, 256, None]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"spine_oversubscription": 0.5}, r"network.spine_oversubscription is 0.5; give 1 for full bandwidth"),
        ({"spine_oversubscription": 2.0}, r"network.spine_oversubscription needs network.leaf_nics"),
        ({"rail_optimized": True}, r"network.rail_optimized needs network.leaf_nics"),
        ({"leaf_nics": 4, "spine_oversubscription": 2.0}, r"leaf_nics is 4, and a node has 8 cards .* give at least 8"),
        ({"nics_per_node": -1}, "nics_per_node"),
        ({"nics_per_node": 2.5}, "nics_per_node"),
        ({"rail_optimized": 1, "leaf_nics": 8}, "rail_optimized"),
        ({"rails": True}, "rails"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(network: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _h100(**network)


def test_a_network_within_nodes_is_refused() -> None:
    with pytest.raises(PlanError, match="'nvlink' joins 8 devices and has a network; state it for the last link"):
        Network(leaf_nics=8).links(Link("nvlink", 8, 1e-6, 400.0), 1)
    with pytest.raises(PlanError, match="nics_per_node is -1; give a number of cards"):
        Network(nics_per_node=-1)
