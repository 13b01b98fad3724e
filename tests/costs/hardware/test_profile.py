"""Hardware profiles: every one loads, states its sources, and gives each mesh axis the link it runs over."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costs.hardware.load import ALIASES, PROFILES, is_profile_of, known_profiles, load, parse
from autopar.costs.hardware.profile import Efficiencies, Hardware, Link, Protocol
from autopar.errors import PlanError
from tests.support.mutations import mutated

PRODUCTS = {
    **dict.fromkeys(("a100", "a100-40gb", "h100"), ("fit: benchmarks.fit_profiles", "profiles.txt")),
    "h200": ("assumed: as fitted for h100 (benchmarks.fit_profiles", "profiles.txt"),
    "gb200": ("fit: benchmarks/blackwell.csv", "blackwell.txt"),
    "b200": ("assumed: as fitted for gb200 (benchmarks/blackwell.csv", "blackwell.txt"),
}
"""Profile → how the source of its `product_efficiency` begins, and the results that it names."""
INNER, OUTER = Link("inner", 8, 1e-6, 1e11), Link("outer", None, 1e-5, 1e10)


def _treed(name: str, devices: int | None) -> Link:
    """A link that knows only a tree, by the name of the ring that other links know."""
    return Link(name, devices, 0.0, 1.0, (Protocol("messages", "tree"),))


def _hardware(**changes: Any) -> Hardware:
    fields: dict[str, Any] = {
        "name": "box",
        "flops": {"float32": 1e12, "bfloat16": 2e12},
        "memory_bytes_per_s": 1e12,
        "memory_bytes": 1 << 30,
        "op_latency_s": 1e-6,
        "links": (INNER, OUTER),
    }
    return Hardware(**(fields | changes))


def _numbers(profile: object) -> Iterator[object]:
    """Every number of a profile, as the dict that states its source (or bare where it does not)."""
    if isinstance(profile, dict):
        if "value" in profile:
            yield profile
        else:
            for entry in profile.values():
                yield from _numbers(entry)
    elif isinstance(profile, list):
        for entry in profile:
            yield from _numbers(entry)
    elif isinstance(profile, (int, float)):
        yield profile


def test_the_profiles_that_ship_are_known() -> None:
    assert set(known_profiles()) >= {"a100", "a100-40gb", "b200", "cpu", "gb200", "h100", "h200"}


@pytest.mark.parametrize("name", known_profiles())
def test_a_profile_loads_and_states_the_source_of_every_number(name: str) -> None:
    hardware = load(name)
    assert hardware.name == name
    numbers = list(_numbers(json.loads((PROFILES / f"{name}.json").read_text())))
    assert len(numbers) >= 6
    for number in numbers:
        assert isinstance(number, dict), f"{name}: {number} has no source"
        assert number["source"].split(":")[0] in {"datasheet", "measured", "fit", "derived", "assumed"}


@pytest.mark.parametrize("name", [name for name in known_profiles() if name != "cpu"])
def test_what_a_gpu_reaches_is_less_than_its_peaks_and_a_fit_names_script_date_and_data(name: str) -> None:
    hardware, written = load(name), json.loads((PROFILES / f"{name}.json").read_text())
    assert hardware.product_efficiency < 1 and hardware.attention_efficiency < 1
    assert hardware.elementwise_bytes_per_s < hardware.memory_bytes_per_s
    assert hardware.product_wave % (128 * 256) == 0, "a tile on each multiprocessor"
    begin, results = PRODUCTS[name]
    source = written["product_efficiency"]["source"]
    assert source.startswith(begin) and "2026-11-28" in source and results in source


def test_a_measured_number_names_hardware_date_and_script() -> None:
    source = json.loads((PROFILES / "cpu.json").read_text())["op_latency_s"]["source"]
    assert all(part in source for part in ("measured", "EPYC", "2026-11-21", "autopar calibrate"))


def test_numbers_are_read_with_their_units() -> None:
    h100 = load("h100")
    assert h100.flops_of(torch.bfloat16) == 989.5e12
    assert (h100.memory_bytes_per_s, h100.memory_bytes) == (3.35e12, 80_000_000_000)
    assert [(link.devices, link.bytes_per_s) for link in h100.links] == [(8, 450e9), (None, 50e9)]
    names = ["ring/LL", "ring/LL128", "ring/Simple", "tree/LL", "tree/LL128", "tree/Simple"]
    assert all([str(protocol) for protocol in link.protocols] == names for link in h100.links)
    assert h100.links[0].protocol("ring", "LL") == Protocol("LL", "ring", 6.6e-6, 6e-7, 0.195)
    assert h100.links[0].protocol("ring", "LL64") is None
    assert h100.communication_share == 0.15


def test_the_ranks_of_a_host_hide_nothing() -> None:
    assert load("cpu").communication_share == 1.0


def test_a_latency_alone_stands_for_one_ring_protocol() -> None:
    assert INNER.protocols == (Protocol("messages", "ring", 1e-6, 0.0, 1.0),)


def test_a_profile_is_read_from_a_path_with_or_without_sources(tmp_path: Path) -> None:
    profile = {
        "name": "mine",
        "flops": {"float32": 1e12},
        "memory_bytes_per_s": {"value": 1e11, "source": "a guess"},
        "memory_bytes": 1000,
        "op_latency_s": 0,
        "links": [{"name": "wire", "devices": None, "latency_s": 1e-3, "bytes_per_s": 1e9}],
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile))
    expected = Hardware("mine", {"float32": 1e12}, 1e11, 1000, 0.0, (Link("wire", None, 1e-3, 1e9),))
    assert load(path) == expected == load(str(path))
    assert hash(load(path)) == hash(expected)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        PlanError, match="'h1000' is not known; use one of 'a100', 'a100-40gb', 'b200', 'cpu', 'gb200', 'h100', 'h200'"
    ):
        load("h1000")


def test_a_missing_file_lists_the_known_names() -> None:
    with pytest.raises(PlanError, match=r"'nowhere/box.json' does not exist; known names are 'a100'"):
        load("nowhere/box.json")


def test_a_profile_that_lacks_a_number_says_which(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text('{"name": "box", "links": []}')
    with pytest.raises(PlanError, match=r"lacks 'flops'; compare it with cpu.json"):
        load(path)
    path.write_text(json.dumps(_profile({"name": "wire", "devices": None, "bytes_per_s": 1.0})))
    with pytest.raises(PlanError, match=r"lacks 'latency_s'; compare it with cpu.json"):
        load(path)
    path.write_text("{")
    with pytest.raises(PlanError, match="is no JSON"):
        load(path)


def test_a_dtype_the_profile_does_not_list_computes_as_float32() -> None:
    hardware = _hardware()
    assert hardware.flops_of(torch.bfloat16) == hardware.flops_of("bfloat16") == 2e12
    assert hardware.flops_of(torch.int64) == 1e12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": {"bfloat16": 1.0}}, "has no flops for float32"),
        ({"flops": {"float32": 0.0}}, "flops of float32 = 0.0; give a number above 0"),
        ({"memory_bytes": 0}, "memory_bytes = 0; give a number above 0"),
        ({"op_latency_s": -1.0}, "op_latency_s = -1.0"),
        ({"launch_s": -1.0}, "launch_s = -1.0; give at least 0"),
        ({"product_wave": -1.0}, "product_wave = -1.0; give at least 0"),
        ({"attention_length": -1.0}, "attention_length = -1.0; give at least 0"),
        ({"product_efficiency": 0.0}, "product_efficiency = 0.0; give a share above 0, at most 1"),
        ({"communication_share": 1.5}, "communication_share = 1.5; give a share, from 0 to 1"),
        ({"links": (INNER,)}, "needs a last link that joins any number"),
        ({"links": (INNER, INNER, OUTER)}, "list them innermost first"),
        ({"links": (INNER, Link("rack", 12, 0.0, 1.0), OUTER)}, "[8, 12] devices; list them innermost first, each a"),
        ({"links": (INNER, Link("wire", None, 0.0, 1.0, (Protocol("LL"),)))}, "found [['messages'], ['LL']]"),
        ({"links": (_treed("inner", 8), OUTER)}, "no ring protocol that all of its links know"),
        ({"links": (OUTER, OUTER)}, "list them innermost first"),
    ],
)
def test_hardware_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        _hardware(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((0, 0.0, 1.0), "joins 0 devices"), ((8, -1.0, 1.0), "latency of -1.0 s"), ((8, 0.0, 0.0), "moves 0.0 bytes/s")],
)
def test_a_link_that_makes_no_sense_is_refused(numbers: tuple[int, float, float], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Link("wire", *numbers)
    assert message in str(caught.value)


PROTOCOL = {"name": "LL", "algorithm": "ring"}


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (("LL", "star"), "is of algorithm 'star'; use one of ring, tree"),
        (("LL", "ring", -1.0), "ring/LL has a base latency of -1.0 s"),
        (("LL", "tree", 0.0, -1.0), "tree/LL has a step latency of -1.0 s"),
        (("LL", "ring", 0.0, 0.0, 1.5), "ring/LL has an efficiency of 1.5; give a share above 0, at most 1"),
        (("LL", "ring", 0.0, 0.0, 0.0), "efficiency of 0.0"),
    ],
)
def test_a_protocol_that_makes_no_sense_is_refused(protocol: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Protocol(*protocol)
    assert message in str(caught.value)


def test_a_link_with_protocols_has_no_latency_of_its_own_and_each_protocol_once() -> None:
    with pytest.raises(PlanError, match="has protocols and a latency of its own; leave latency_s out"):
        Link("wire", None, 1e-6, 1.0, (Protocol("LL"),))
    with pytest.raises(PlanError, match="has the protocols ring/LL, ring/LL; give each once"):
        Link("wire", None, 0.0, 1.0, (Protocol("LL"), Protocol("LL")))


def _profile(link: dict[str, Any], **changes: Any) -> dict[str, Any]:
    numbers = {"memory_bytes_per_s": 1e11, "memory_bytes": 1000, "op_latency_s": 0}
    return {"name": "mine", "flops": {"float32": 1e12}, **numbers, "links": [link], **changes}


def test_protocols_and_what_collectives_take_are_read(tmp_path: Path) -> None:
    numbers = {"base_latency_s": 1e-6, "step_latency_s": {"value": 2e-6, "source": "assumed"}, "efficiency": 0.5}
    link = {"name": "wire", "devices": None, "bytes_per_s": 1e9, "protocols": [PROTOCOL | numbers]}
    link["efficiencies"] = {"all_to_all": 0.5}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(_profile(link)))
    hardware = load(path)
    protocol = Protocol("LL", "ring", 1e-6, 2e-6, 0.5)
    assert hardware.links == (Link("wire", None, 0.0, 1e9, (protocol,), Efficiencies(all_to_all=0.5)),)
    assert (hardware.communication_share, hardware.launch_s) == (1.0, 0.0)
    path.write_text(json.dumps(_profile(link, communication_share=0.5, launch_s={"value": 2e-6, "source": "assumed"})))
    assert (load(path).communication_share, load(path).launch_s) == (0.5, 2e-6)


def test_an_efficiency_is_a_share() -> None:
    with pytest.raises(PlanError, match=r"efficiencies\.all_gather is 2.0; give a share above 0, at most 1"):
        Efficiencies(all_gather=2.0)


@pytest.mark.parametrize(
    ("link", "changes", "message"),
    [
        ({"efficiencies": {"gather": 1}}, {}, "efficiencies has 'gather'; it may have 'all_reduce', 'all_gather'"),
        (
            {"protocols": [PROTOCOL | {"latency": 1}]},
            {},
            "protocols[0] has 'latency'; it may have 'name', 'algorithm', 'base",
        ),
        (
            {},
            {"overlap": {"gradient_reduction": 0.5}},
            "it has 'overlap', shares that are hidden; what is hidden follows from the program. Give 'communication_s",
        ),
        (
            {"bytes_per_s": "fast"},
            {},
            "bytes_per_s is 'fast'; needed a finite number, bare or given together with its source",
        ),
        ({"bytes_per_s": True}, {}, "bytes_per_s is True; needed a finite number"),
        ({"devices": 8}, {}, "needs a last link that joins any number of devices"),
    ],
)
def test_a_profile_that_cannot_be_read_names_the_file_and_the_number(
    tmp_path: Path, link: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "mine.json"
    whole = {"name": "wire", "devices": None, "latency_s": 0.0, "bytes_per_s": 1e9} | link
    path.write_text(json.dumps(_profile(whole, **changes)))
    with pytest.raises(PlanError) as caught:
        load(path)
    assert f"profile {str(path)!r}: " in str(caught.value)
    assert message in str(caught.value)


def test_attention_is_as_fast_as_matmuls_where_nothing_else_is_stated() -> None:
    profile = json.loads((PROFILES / "cpu.json").read_text())
    assert parse(profile).attention_efficiency == 1.0
    assert parse({**profile, "attention_efficiency": 0.3}).attention_efficiency == 0.3
    assert parse(profile).product_efficiency == 1.0
    assert parse({**profile, "product_efficiency": 0.7}).product_efficiency == 0.7
    faster = parse({**profile, "attention_efficiency": 1.5, "product_efficiency": 0.6})
    assert faster.attention_efficiency == 1.5, "attention may be faster than large products, not than the peak"
    for times in (0, 1.5):
        with pytest.raises(
            PlanError,
            match=rf"attention_efficiency = {times:.1f}; times product_efficiency = 1.0 it is a share of the peak",
        ):
            parse({**profile, "attention_efficiency": times})


@pytest.mark.parametrize("name", ["product_wave", "attention_length", "attention_head"])
def test_shapes_cost_nothing_where_a_profile_says_nothing_of_them(name: str) -> None:
    profile = json.loads((PROFILES / "cpu.json").read_text())
    assert getattr(parse(profile), name) == 0.0
    assert getattr(parse({**profile, name: {"value": 3e-5, "source": "a guess"}}), name) == 3e-5


@pytest.mark.parametrize("name", ["elementwise_bytes_per_s", "product_bytes_per_s"])
def test_operations_go_at_the_speed_of_memory_where_nothing_else_is_stated(name: str) -> None:
    profile = json.loads((PROFILES / "cpu.json").read_text())
    assert getattr(parse(profile), name) == parse(profile).memory_bytes_per_s
    assert getattr(parse({**profile, name: 5e9}), name) == 5e9
    with pytest.raises(PlanError, match=rf"has {name} = -1\.0; give a number above 0"):
        parse({**profile, name: -1})


def test_how_late_hosts_are_is_read_and_less_than_nothing_refused() -> None:
    profile = json.loads((PROFILES / "cpu.json").read_text())
    (link,) = profile["links"]
    assert parse(profile).links[0].straggling_s == 0.0
    assert parse({**profile, "links": [{**link, "straggling_s": 2e-4}]}).links[0].straggling_s == 2e-4
    with pytest.raises(PlanError, match=r"has a straggling_s of -1\.0; give seconds of at least 0"):
        parse({**profile, "links": [{**link, "straggling_s": -1}]})


def test_latencies_of_collectives_are_read_and_those_below_nothing_refused() -> None:
    profile = json.loads((PROFILES / "cpu.json").read_text())
    (link,) = profile["links"]
    read = parse({**profile, "links": [{**link, "latencies": {"all_to_all": 0.5}}]})
    assert (read.links[0].latencies.all_to_all, read.links[0].latencies.all_reduce) == (0.5, 1.0)
    with pytest.raises(PlanError, match=r"latencies\.all_gather is -1\.0; give a number of at least 0"):
        parse({**profile, "links": [{**link, "latencies": {"all_gather": -1}}]})


@settings(max_examples=60, deadline=timedelta(seconds=5))
@given(st.randoms(use_true_random=False))
def test_a_profile_that_was_damaged_is_refused_or_a_profile(source: random.Random) -> None:
    profile = json.loads((PROFILES / "cpu.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.json")
        path.write_text(json.dumps(mutated(profile, source)))
        try:
            assert load(path).links
        except PlanError as error:
            assert str(error).startswith(f"the hardware profile {str(path)!r}: ")


@pytest.mark.parametrize("content", [b"\x80", b"[" * 10**5, b'{"name": NaN}', b"3", b"null"])
def test_a_file_that_is_no_profile_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"the hardware profile '.*mine\.json': "):
        load(path)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_profile_that_it_names(alias: str, name: str) -> None:
    assert load(alias) == load(name)
    assert not is_profile_of(alias, "AMD MI300X"), "a profile of its own device alone"
