"""Memory conventions of a device: every switch, and the communicators of a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.costs.hardware.load import load
from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.costs.pricing.conventions import CONVENTIONS, MemoryConventions, num_communicators
from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh

MESH = Mesh({"pp": 2, "dp": 1, "tp": 4})
H100 = load("h100")


def test_autopars_conventions_are_the_profiles_numbers() -> None:
    found = MemoryConventions.of("autopar").reserved(H100, MESH)
    buffers = 3 * H100.communicator_bytes
    assert found == Reserved(H100.allocator_factor, H100.context_bytes, buffers, H100.workspace_bytes)
    assert MemoryConventions.of("autopar").reserved(load("cpu"), MESH) == NOTHING
    assert MemoryConventions.of("tensors").reserved(H100, MESH) == NOTHING


@pytest.mark.parametrize(
    ("field", "value", "part", "of_mesh"),
    [
        ("allocator_factor", 1.5, "allocator_factor", 1.5),
        ("context_bytes", 7, "context_bytes", 7),
        ("communicator_bytes", 7, "communicator_bytes", 21),
        ("workspace_bytes", 0, "workspace_bytes", 0),
    ],
)
def test_each_part_is_switched_by_its_name(field: str, value: float, part: str, of_mesh: float) -> None:
    plain, other = (
        each.reserved(H100, MESH) for each in (MemoryConventions(), replace(MemoryConventions(), **{field: value}))
    )
    names = ("allocator_factor", "context_bytes", "communicator_bytes", "workspace_bytes")
    assert {name for name in names if getattr(plain, name) != getattr(other, name)} == {part}
    assert getattr(other, part) == of_mesh


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4))
@example([1]).via("no other rank")
@example([8]).via("the group of the axis is that of all ranks")
def test_a_rank_is_in_a_communicator_per_axis_and_one_of_all(sizes: list[int]) -> None:
    mesh = Mesh({f"a{number}": size for number, size in enumerate(sizes)})
    groups = {tuple(n for n in sizes if n > 1)} | {(number,) for number, size in enumerate(sizes) if size > 1}
    several = sum(size > 1 for size in sizes)
    assert num_communicators(mesh) == (several if several < 2 else len(groups))


@pytest.mark.parametrize("name", CONVENTIONS)
def test_names_mean_conventions(name: str) -> None:
    assert MemoryConventions.of(name) is CONVENTIONS[name]
    assert MemoryConventions.of(CONVENTIONS[name]) is CONVENTIONS[name]


@pytest.mark.parametrize(
    ("specified", "message"),
    [
        ({"allocator_factor": 0.5}, "allocator_factor=0.5; give a factor of at least 1, or None"),
        ({"context_bytes": -1}, "context_bytes=-1; give a whole number of bytes of at least 0, or None"),
        ({"communicator_bytes": 0.5}, "communicator_bytes=0.5; give a whole number"),
        ({"workspace_bytes": "1GB"}, "workspace_bytes='1GB'; give a whole number"),
    ],
)
def test_conventions_that_make_no_sense_are_refused(specified: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MemoryConventions(**specified)


def test_a_name_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(InputError, match=r"Memory\(conventions='nemo'\); give one of 'autopar', 'tensors', 'megatron'"):
        MemoryConventions.of("nemo")
