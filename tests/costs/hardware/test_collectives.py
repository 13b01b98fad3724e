"""The cost of a collective: which links a group runs over, and formulas worked out by hand for each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.hardware.collectives import (
    Level,
    Transfer,
    collective_seconds,
    levels_of,
    pieces,
    ports_used,
    transfer_seconds,
    used_devices,
)
from autopar.costs.hardware.load import known_profiles, load
from autopar.costs.hardware.overlap import Message, OverlappedWork, Pass
from autopar.costs.hardware.profile import Efficiencies, Hardware, Latencies, Link, Protocol
from autopar.errors import MeshError
from autopar.ir.sharding.mesh import Mesh

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
INNER, OUTER = Link("inner", 8, 1e-6, 400.0), Link("outer", None, 1e-5, 40.0)


def _hardware(*links: Link, **changes: Any) -> Hardware:
    return Hardware("box", {"float32": 1.0}, 1.0, 1, 0.0, links, **changes)


def _stepping(name: str, devices: int | None, step_s: float, bytes_per_s: float, *more: Protocol) -> Link:
    """A link with one ring protocol that starts at 100 s and costs `step_s` a step."""
    return Link(name, devices, 0.0, bytes_per_s, (Protocol("p", "ring", 100.0, step_s), *more))


@pytest.mark.parametrize(
    ("axes", "axis", "levels"),
    [
        ({"dp": 4, "tp": 8}, "tp", [(INNER, 1, 8)]),
        ({"dp": 4, "tp": 8}, "dp", [(OUTER, 1, 4)]),
        ({"dp": 8, "tp": 2}, "dp", [(INNER, 1, 4), (OUTER, 4, 8)]),  # every second device of two nodes
        ({"dp": 4, "cp": 2, "tp": 4}, "cp", [(INNER, 1, 2)]),
        ({"dp": 2, "tp": 3}, "tp", [(INNER, 1, 3)]),  # six devices fit in one node of eight
        ({"dp": 4, "tp": 3}, "tp", [(INNER, 1, 3)]),  # six of eight devices of two nodes
        ({"dp": 8, "tp": 3}, "tp", [(OUTER, 1, 3)]),  # three whole nodes: devices 6, 7 and 8 lie on two of them
        ({"dp": 2, "tp": 12}, "tp", [(INNER, 1, 4), (OUTER, 4, 12)]),  # eight and four, or four and eight
        ({"dp": 4, "tp": 3}, "dp", [(INNER, 1, 2), (OUTER, 2, 4)]),
        ({"dp": 8, "tp": 3}, "dp", [(OUTER, 1, 8)]),  # a stride of 3 hits a node of 8 twice or thrice
        ({"dp": 3, "tp": 4}, "tp", [(INNER, 1, 4)]),  # four of eight devices of three nodes
        ({"dp": 3, "tp": 4}, "dp", [(OUTER, 1, 3)]),
        ({"tp": 16}, "tp", [(INNER, 1, 8), (OUTER, 8, 16)]),
        ({"dp": 4, "tp": 1}, "tp", []),
        ({"tp": 4}, "tp", [(INNER, 1, 4)]),
    ],
)
def test_a_group_has_the_links_that_its_members_lie_on(
    axes: dict[str, int], axis: str, levels: list[tuple[Link, int, int]]
) -> None:
    found = levels_of((INNER, OUTER), Mesh(axes), axis)
    assert found == tuple(Level(link, inner, outer, link is INNER) for link, inner, outer in levels)


@pytest.mark.parametrize(
    ("axes", "joined"),
    [
        ({"dp": 4, "tp": 8}, "dp_tp"),
        ({"dp": 8, "tp": 2}, "dp_tp"),
        ({"dp": 3, "tp": 8}, "dp_tp"),
        ({"dp": 2, "one": 1, "tp": 12}, "dp_tp"),
        ({"pp": 4, "dp": 2, "tp": 2}, "dp_tp"),
        ({"dp": 2, "cp": 8, "tp": 2}, "dp_cp_tp"),
        ({"dp": 2, "cp": 4, "tp": 4}, "dp_cp"),
    ],
)
@pytest.mark.parametrize("node", [6, 8])
def test_joined_axes_that_follow_each_other_are_as_one_axis(axes: dict[str, int], joined: str, node: int) -> None:
    names = list(axes)
    first, last = names.index(joined.split("_")[0]), names.index(joined.split("_")[-1])
    size = math.prod(axes[name] for name in names[first : last + 1])
    others = [{name: axes[name] for name in some} for some in (names[:first], names[last + 1 :])]
    links = (Link("inner", node, 1e-6, 400.0), OUTER)
    assert levels_of(links, Mesh(axes), joined) == levels_of(
        links, Mesh({**others[0], "one": size, **others[1]}), "one"
    )


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 8), (2, 8, 4)])
def test_joined_axes_apart_from_each_other_have_as_many_members_in_a_node_as_lie_there(
    sizes: tuple[int, int, int],
) -> None:
    mesh = Mesh(dict(zip(("dp", "cp", "tp"), sizes, strict=True)))
    group = [dp * sizes[1] * sizes[2] + tp for dp in range(sizes[0]) for tp in range(sizes[2])]
    for node in (2, 4, 8, 16, 32):
        together = max(Counter(device // node for device in group).values())
        found = levels_of((Link("inner", node, 1e-6, 400.0), OUTER), mesh, "dp_tp")
        assert found[0].outer == (together if together > 1 else len(group))
        assert found[-1].outer == len(group)


def test_a_rack_is_a_level_between_the_node_and_the_rest() -> None:
    rack = Link("rack", 32, 0.0, 20.0)
    found = levels_of((INNER, rack, OUTER), Mesh({"dp": 64}), "dp")
    assert [(level.link.name, level.inner, level.outer) for level in found] == [
        ("inner", 1, 8),
        ("rack", 8, 32),
        ("outer", 32, 64),
    ]


NVL72 = Link("nvlink", 72, 1e-6, 900.0)


@pytest.mark.parametrize(
    ("axes", "axis", "levels"),
    [
        ({"dp": 4, "ep": 64}, "ep", [(NVL72, 1, 64)]),  # 64 of 72 devices of four domains
        ({"dp": 4, "ep": 64}, "dp", [(OUTER, 1, 4)]),
        ({"ep": 64}, "ep", [(NVL72, 1, 64)]),
        ({"dp": 8, "ep": 32}, "ep", [(NVL72, 1, 32)]),
        ({"dp": 8, "ep": 32}, "dp", [(NVL72, 1, 2), (OUTER, 2, 8)]),  # two groups of 32 in a domain
        ({"dp": 3, "ep": 32}, "ep", [(NVL72, 1, 32)]),  # 96 devices: 48 would cut a group in two
        ({"dp": 256}, "dp", [(NVL72, 1, 64), (OUTER, 64, 256)]),
        ({"dp": 4, "ep": 8, "tp": 8}, "ep", [(NVL72, 1, 8)]),  # a stride of 8 and a span of 64
        ({"dp": 4, "ep": 8, "tp": 8}, "dp_tp", [(NVL72, 1, 8), (OUTER, 8, 32)]),
        ({"ep": 128, "tp": 2}, "ep", [(NVL72, 1, 32), (OUTER, 32, 128)]),
        ({"dp": 2, "ep": 72}, "ep", [(NVL72, 1, 72)]),  # two whole domains
        ({"dp": 9, "ep": 16}, "ep", [(NVL72, 1, 8), (OUTER, 8, 16)]),  # whole domains hold four groups and a half
        ({"dp": 2, "ep": 36}, "dp", [(NVL72, 1, 2)]),
    ],
)
def test_a_domain_is_used_in_multiples_that_the_axes_of_a_mesh_nest_in(
    axes: dict[str, int], axis: str, levels: list[tuple[Link, int, int]]
) -> None:
    found = levels_of((NVL72, OUTER), Mesh(axes), axis)
    assert found == tuple(Level(link, inner, outer, link is NVL72) for link, inner, outer in levels)


def test_blocks_of_a_wider_link_hold_whole_blocks_of_the_link_before() -> None:
    rack = Link("rack", 32, 0.0, 20.0)
    assert used_devices((INNER, rack, OUTER), Mesh({"dp": 8, "tp": 6})) == (8, 24, 48)
    assert used_devices((INNER, rack, OUTER), Mesh({"dp": 12, "tp": 5})) == (5, 30, 60)


@pytest.mark.parametrize("sizes", [(4, 64), (8, 32), (16, 16), (2, 2, 64), (5, 12), (7, 11, 2), (3, 5, 7, 2)])
def test_every_block_gives_as_many_devices_and_every_axis_nests_in_it(sizes: tuple[int, ...]) -> None:
    mesh = Mesh({f"a{number}": size for number, size in enumerate(sizes)})
    used, everything = used_devices((NVL72, OUTER), mesh)
    assert everything == mesh.num_devices and mesh.num_devices % used == 0 and used <= 72
    for position in range(mesh.ndim):
        span = math.prod(sizes[position:])
        assert used % span == 0 or span % used == 0


def test_an_all_to_all_among_64_of_256_devices_stays_in_nvlink_domains() -> None:
    """1 GB by each of 64 GPUs: 63/64 of it at 0.8 of 900 GB/s, and not 7/8 of it at 0.97 of 50 GB/s."""
    hardware = load("gb200")
    seconds = transfer_seconds(Transfer("all_to_all", "ep", 10**9), Mesh({"dp": 4, "ep": 64}), hardware)
    assert seconds == transfer_seconds(Transfer("all_to_all", "ep", 10**9), Mesh({"ep": 64}), hardware)
    assert seconds == pytest.approx(10**9 * 63 / 64 / (0.802 * 9e11), rel=0.2)


def test_an_axis_the_mesh_lacks_is_an_error() -> None:
    with pytest.raises(MeshError, match="no axis 'tp'"):
        levels_of((OUTER,), Mesh({"dp": 2}), "tp")


@pytest.mark.parametrize(
    ("collective", "seconds"), [("all_reduce", 0.5 + 150), ("all_gather", 0.5 + 75), ("all_to_all", 0.5 + 75)]
)
def test_a_link_with_a_latency_alone_costs_latency_and_share(collective: str, seconds: float) -> None:
    hardware = _hardware(Link("wire", None, 0.5, 2.0))
    assert transfer_seconds(Transfer(collective, "tp", 200), Mesh({"tp": 4}), hardware) == seconds
    ten = transfer_seconds(Transfer(collective, "tp", 200), Mesh({"tp": 4}), hardware, Message(10))
    assert ten == pytest.approx(seconds - 0.45)


@pytest.mark.parametrize(
    ("collective", "latency", "bytes_per_s"),
    [
        # Two nodes of eight: 15 steps around the ring, one of them between nodes, over 8 · 40 < 400 bytes/s.
        ("all_gather", 100 + 14 * 1 + 1 * 10, 320 / (15 / 16)),
        ("reduce_scatter", 100 + 14 * 1 + 1 * 10, 320 / (15 / 16)),
        ("all_reduce", 100 + 28 * 1 + 2 * 10, 320 / (30 / 16)),
        # Seven messages in the node and eight beyond; half of the bytes leave the node over one's own port.
        ("all_to_all", 100 + 7 * 1 + 8 * 10, 40 / (8 / 16)),
    ],
)
def test_a_group_of_two_nodes_uses_all_their_ports(collective: str, latency: float, bytes_per_s: float) -> None:
    hardware = _hardware(_stepping("inner", 8, 1.0, 400.0), _stepping("outer", None, 10.0, 40.0))
    ((found, seconds_per_byte),) = pieces(collective, Mesh({"dp": 16}), "dp", hardware)
    assert (found, 1 / seconds_per_byte) == pytest.approx((latency, bytes_per_s))


def test_fast_ports_leave_the_node_as_the_bound() -> None:
    hardware = _hardware(_stepping("inner", 8, 1.0, 400.0), _stepping("outer", None, 10.0, 60.0))
    ((_, seconds_per_byte),) = pieces("all_gather", Mesh({"dp": 16}), "dp", hardware)
    assert 1 / seconds_per_byte == pytest.approx(400 / (15 / 16))  # and not 8 · 60


def test_an_oversubscribed_rack_is_the_bound() -> None:
    links = (
        _stepping("inner", 8, 1.0, 400.0),
        _stepping("rack", 32, 10.0, 50.0),
        _stepping("spine", None, 20.0, 5.0),
    )
    ((latency, seconds_per_byte),) = pieces("all_gather", Mesh({"dp": 64}), "dp", _hardware(*links))
    # Eight nodes in two racks: 7 steps in each node, 3 in each rack, 1 between racks; 32 ports of 5 bytes/s.
    assert latency == 100 + 8 * 7 * 1 + 2 * 3 * 10 + 1 * 20
    assert 1 / seconds_per_byte == pytest.approx(160 / (63 / 64))


def test_one_device_in_each_node_uses_its_own_port() -> None:
    hardware = _hardware(_stepping("inner", 8, 1.0, 400.0), _stepping("outer", None, 10.0, 40.0))
    ((latency, seconds_per_byte),) = pieces("all_gather", Mesh({"dp": 4, "tp": 8}), "dp", hardware)
    assert latency == 100 + 3 * 10
    assert 1 / seconds_per_byte == pytest.approx(40 / (3 / 4))


def test_a_tree_is_a_chain_in_a_node_and_branches_between_nodes() -> None:
    tree = Protocol("p", "tree", 7.0, 1.0, 0.5)
    inner, outer = _stepping("inner", 8, 9.0, 400.0, tree), _stepping("outer", None, 90.0, 40.0, tree)
    # 16 nodes of eight: up and down 7 devices and 4 rounds; twice the bytes over 8 ports of half of 40 bytes/s.
    found = pieces("all_reduce", Mesh({"dp": 128}), "dp", _hardware(inner, outer))
    assert found[0] == pytest.approx((7 + 2 * (7 + 4), 2 / (8 * 20)))
    assert pieces("all_gather", Mesh({"dp": 128}), "dp", _hardware(inner, outer))[0][0] > 100  # a tree is no gather
    # Five nodes, one device in each: three rounds.
    assert pieces("all_reduce", Mesh({"dp": 5, "tp": 8}), "dp", _hardware(inner, outer))[0][0] == 7 + 2 * 3


SMALL, LARGE = Protocol("LL", "ring", 1.0, 0.0, 0.25), Protocol("Simple", "ring", 5.0, 0.0, 1.0)
POOR = Protocol("poor", "ring", 6.0, 0.0, 0.5)
TWO = _hardware(Link("wire", None, 0.0, 1.0, (LARGE, POOR, SMALL)))
PAIR = Mesh({"dp": 2})


def test_the_protocol_follows_the_size_of_the_message() -> None:
    assert pieces("all_gather", PAIR, "dp", TWO) == ((1.0, 2.0), (5.0, 0.5))  # and the poor one is never best
    sizes = np.array([0.0, 1.0, 2.0, 3.0, 100.0])
    assert list(np.asarray(collective_seconds("all_gather", sizes, PAIR, "dp", TWO))) == [1.0, 3.0, 5.0, 6.5, 55.0]
    assert [collective_seconds("all_gather", float(size), PAIR, "dp", TWO) for size in sizes] == [1, 3, 5, 6.5, 55]


def test_a_collective_over_several_links_uses_a_protocol_they_all_know() -> None:
    fast = Protocol("LL128", "ring", 0.0)
    hardware = _hardware(Link("inner", 2, 0.0, 1.0, (fast, LARGE)), Link("outer", None, 0.0, 1.0, (LARGE, SMALL)))
    assert pieces("all_gather", Mesh({"dp": 4}), "dp", hardware) == ((5.0, 0.75),)
    assert pieces("all_gather", PAIR, "dp", hardware)[0][0] == 0.0


def test_a_collective_that_the_library_runs_poorly_gets_less_of_the_bandwidth() -> None:
    plain_link = Link("wire", None, 0.5, 1.0, efficiencies=Efficiencies(reduce_scatter=0.25))
    assert pieces("reduce_scatter", PAIR, "dp", _hardware(plain_link)) == ((0.5, 2.0),)
    assert pieces("all_gather", PAIR, "dp", _hardware(plain_link)) == ((0.5, 0.5),)


def test_a_collective_that_the_library_starts_slowly_pays_more_latency_on_each_link() -> None:
    protocol = (Protocol("messages", "ring", 1.0, 0.5),)
    inner, outer = (
        Link(name, devices, 0.0, 1.0, protocol, latencies=Latencies(all_to_all=factor))
        for name, devices, factor in (("inner", 2, 3.0), ("outer", None, 2.0))
    )
    mesh, hardware = Mesh({"dp": 4}), _hardware(inner, outer)
    steps = {"inner": 1, "outer": 2}  # of an all-to-all: to the neighbour, and to the two of the other block
    (exchanged,) = pieces("all_to_all", mesh, "dp", hardware)
    assert exchanged[0] == 3.0 * 1.0 + 0.5 * (3.0 * steps["inner"] + 2.0 * steps["outer"])
    (gathered,) = pieces("all_gather", mesh, "dp", hardware)
    assert gathered[0] == 1.0 + 0.5 * 3, "the others start as the protocol says"


def test_a_parameter_pays_its_part_of_a_message_as_far_as_nothing_is_computed_next_to_it() -> None:
    protocols = (Protocol("quick", "ring", 1.0, 0.0, 0.1), Protocol("wide", "ring", 8.0, 0.0, 1.0))
    hardware = _hardware(Link("wire", None, 0.0, 1.0, protocols), communication_share=0.25)
    reduced = Transfer("all_reduce", "dp", 2)
    assert transfer_seconds(reduced, PAIR, hardware) == 10.0  # 8 and 2 bytes, or 1 and 20
    assert transfer_seconds(reduced, PAIR, hardware, Message(4)) == (8.0 + 8.0) / 4
    # Ten such parameters take 40 s in messages of four, overlapped with 10 s of each of two devices, 1 s of it latency.
    for computing, exposed in ((18.0, 1 - 10 / 40), (1e9, 0.25), (0.0, 1 - 1 / 40)):
        overlapped = OverlappedWork(Pass(1e9, 1e9, 1), Pass(computing, 1.0, 20), 10)
        found = transfer_seconds(reduced, PAIR, hardware, Message(4, 1, 2, 1, overlapped))
        assert found == pytest.approx(exposed * 4.0)


def test_an_axis_of_one_device_costs_nothing() -> None:
    assert transfer_seconds(Transfer("all_reduce", "dp", 100), Mesh({"dp": 1, "tp": 2}), TWO) == 0.0


def test_a_collective_without_a_formula_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="no cost for a collective 'broadcast'"):
        pieces("broadcast", PAIR, "dp", TWO)


AXES = st.sampled_from(
    [
        ({"dp": 8}, "dp"),
        ({"dp": 64}, "dp"),
        ({"dp": 8, "tp": 8}, "dp"),
        ({"dp": 4, "tp": 4}, "dp"),
        ({"a": 3, "b": 5}, "a"),
    ]
)


@given(st.sampled_from(known_profiles()), AXES, st.lists(st.integers(0, 1 << 32), min_size=2, max_size=2))
def test_costs_grow_with_the_bytes_and_are_those_of_the_transposed_collective(
    name: str, axes: tuple[dict[str, int], str], sizes: list[int]
) -> None:
    hardware, mesh, axis = load(name), Mesh(axes[0]), axes[1]
    small, large = sorted(sizes)
    for collective in COLLECTIVES:
        less, more = (collective_seconds(collective, size, mesh, axis, hardware) for size in (small, large))
        assert 0 <= less <= more < math.inf
    gather, scatter = (pieces(each, mesh, axis, hardware) for each in ("all_gather", "reduce_scatter"))
    assert gather == scatter
    best = collective_seconds("all_reduce", large, mesh, axis, hardware)
    whole = 2 * collective_seconds("all_gather", large, mesh, axis, hardware)
    assert best <= whole * (1 + 1e-9), "an all-reduce is at most a reduce-scatter and an all-gather"


def test_eight_gpus_all_reduce_at_the_speed_that_nccl_counts_on() -> None:
    h100, mesh = load("h100"), Mesh({"dp": 2, "tp": 8})
    seconds = transfer_seconds(Transfer("all_reduce", "tp", 1 << 30), mesh, h100)
    assert 2 * 7 / 8 * (1 << 30) / seconds == pytest.approx(0.824 * 450e9, rel=0.02)
    assert transfer_seconds(Transfer("all_reduce", "dp", 1 << 30), mesh, h100) > 4 * seconds


def _ports(axes: dict[str, int], axis: str, hardware: Hardware, collective: str = "all_gather") -> dict[str, float]:
    return dict(ports_used(Transfer(collective, axis, 10**6), Mesh(axes), hardware))


def test_a_collective_loads_the_links_that_its_groups_run_over() -> None:
    hardware = _hardware(_stepping("inner", 8, 0.0, 400.0), _stepping("outer", None, 0.0, 40.0))
    assert _ports({"dp": 2, "tp": 8}, "tp", hardware) == pytest.approx({"inner": 1.0}, rel=0.1)
    assert _ports({"dp": 2, "tp": 8}, "dp", hardware) == pytest.approx({"outer": 1.0}, rel=0.1)
    # Eight rings of a node share its eight ports of 40, which carry what each device has within of 400.
    assert _ports({"dp": 16}, "dp", hardware) == pytest.approx({"inner": 0.8, "outer": 1.0}, rel=0.1)
    assert _ports({"dp": 1}, "dp", hardware) == {}


def test_latency_loads_no_port() -> None:
    hardware = _hardware(_stepping("inner", 8, 0.0, 400.0), _stepping("outer", None, 0.0, 40.0))
    small = dict(ports_used(Transfer("all_gather", "dp", 80), Mesh({"dp": 2, "tp": 8}), hardware))
    assert small == pytest.approx({"outer": 1 / 101})  # a second of 101


def test_what_crosses_the_spine_passes_the_ports_of_the_racks() -> None:
    links = _stepping("inner", 8, 0.0, 400.0), _stepping("rack", 32, 0.0, 50.0), _stepping("spine", None, 0.0, 25.0)
    assert _ports({"dp": 2, "tp": 32}, "dp", _hardware(*links)) == pytest.approx({"rack": 0.5, "spine": 1.0}, rel=0.1)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("axis", ["dp", "sp", "tp", "dp_tp", "dp_sp_tp"])
def test_no_collective_takes_more_than_a_port(collective: str, axis: str) -> None:
    mesh = Mesh({"dp": 16, "sp": 4, "tp": 4})
    for num_bytes in (10**3, 10**6, 10**9):
        found = dict(ports_used(Transfer(collective, axis, num_bytes), mesh, load("h100")))
        assert found and all(0 <= each <= 1 + 1e-9 for each in found.values())


def test_a_transfer_that_is_waited_for_waits_for_the_last_host_too() -> None:
    late, punctual = (
        _hardware(Link("node", 2, 0.0, 1e9), Link("net", None, 0.0, 1e9, straggling_s=s)) for s in (0.1, 0)
    )
    mesh, transfer = Mesh({"dp": 4, "tp": 2}), Transfer("all_gather", "dp", 1000)
    waits = transfer_seconds(transfer, mesh, late) - transfer_seconds(transfer, mesh, punctual)
    assert waits == pytest.approx(3 * 0.1)
    inside = replace(transfer, axis="tp")
    assert transfer_seconds(inside, mesh, late) == transfer_seconds(inside, mesh, punctual)
