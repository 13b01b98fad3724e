"""Hardware profiles: every one loads, states its sources, and gives each mesh axis the link it runs over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import MeshError, PlanError
from autopar.hardware import PROFILES, Hardware, Link, known_profiles, link_of, load
from autopar.mesh import Mesh

INNER, OUTER = Link("inner", 8, 1e-6, 1e11), Link("outer", None, 1e-5, 1e10)


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
    assert set(known_profiles()) >= {"a100", "b200", "cpu", "h100", "h200"}


@pytest.mark.parametrize("name", known_profiles())
def test_a_profile_loads_and_states_the_source_of_every_number(name: str) -> None:
    hardware = load(name)
    assert hardware.name == name
    numbers = list(_numbers(json.loads((PROFILES / f"{name}.json").read_text())))
    assert len(numbers) >= 6
    for number in numbers:
        assert isinstance(number, dict), f"{name}: {number} has no source"
        assert number["source"].split(":")[0] in {"datasheet", "measured", "assumed"}


def test_a_measured_number_names_hardware_date_and_script() -> None:
    source = json.loads((PROFILES / "cpu.json").read_text())["op_latency_s"]["source"]
    assert all(part in source for part in ("measured", "EPYC", "2026-11-21", "benchmarks/measure_host.py"))


def test_numbers_are_read_with_their_units() -> None:
    h100 = load("h100")
    assert h100.flops_of(torch.bfloat16) == 989.5e12
    assert (h100.memory_bytes_per_s, h100.memory_bytes) == (3.35e12, 80_000_000_000)
    assert [link.bytes_per_s for link in h100.links] == [450e9, 50e9]


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
    with pytest.raises(PlanError, match="'h1000' is not known; use one of 'a100', 'b200', 'cpu', 'h100', 'h200'"):
        load("h1000")


def test_a_missing_file_lists_the_known_names() -> None:
    with pytest.raises(PlanError, match=r"'nowhere/box.json' does not exist; known names are 'a100'"):
        load("nowhere/box.json")


def test_a_profile_that_lacks_a_number_says_which(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text('{"name": "box", "links": []}')
    with pytest.raises(PlanError, match=r"lacks 'flops'; compare it with cpu.json"):
        load(path)
    path.write_text("{")
    with pytest.raises(PlanError, match="is no JSON"):
        load(path)


def test_a_dtype_the_profile_does_not_list_computes_as_float32() -> None:
    hardware = _hardware()
    assert hardware.flops_of(torch.bfloat16) == hardware.flops_of("bfloat16") == 2e12
    assert hardware.flops_of(torch.int64) == 1e12


@pytest.mark.parametrize(
    ("axes", "axis", "link"),
    [
        ({"dp": 4, "tp": 8}, "tp", INNER),
        ({"dp": 4, "tp": 8}, "dp", OUTER),
        ({"dp": 8, "tp": 2}, "dp", OUTER),
        ({"dp": 4, "cp": 2, "tp": 4}, "cp", INNER),
        ({"dp": 2, "tp": 3}, "tp", INNER),  # six devices fit in one node of eight
        ({"dp": 4, "tp": 3}, "tp", OUTER),  # devices 6, 7 and 8 lie on two nodes
        ({"tp": 16}, "tp", OUTER),
        ({"tp": 1}, "tp", INNER),
    ],
)
def test_an_axis_whose_groups_lie_inside_a_node_uses_the_inner_link(axes: dict, axis: str, link: Link) -> None:
    assert link_of(_hardware(), Mesh(axes), axis) is link


def test_an_axis_the_mesh_lacks_is_an_error() -> None:
    with pytest.raises(MeshError, match="no axis 'tp'"):
        link_of(_hardware(), Mesh({"dp": 2}), "tp")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": {"bfloat16": 1.0}}, "has no flops for float32"),
        ({"flops": {"float32": 0.0}}, "flops of float32 = 0.0; give a number above 0"),
        ({"memory_bytes": 0}, "memory_bytes = 0; give a number above 0"),
        ({"op_latency_s": -1.0}, "op_latency_s = -1.0"),
        ({"links": (INNER,)}, "needs a last link that joins any number"),
        ({"links": (INNER, INNER, OUTER)}, "list them innermost first"),
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
