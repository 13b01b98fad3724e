"""mesh="auto": the best of all arrangements, and the others with what they cost or why they are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.annotations.annotate import annotate, annotations_of, pins_of
from autopar.capture.export import capture, trace
from autopar.errors import InfeasibleError, MeshError
from autopar.hardware.load import load
from autopar.hardware.profile import Hardware
from autopar.planning.mesh_search import best_mesh, factorizations, meshes_of
from autopar.planning.planner import make_plan
from autopar.plans.plan import Plan
from autopar.sharding.mesh import Mesh
from autopar.space.build import build_space
from tests.support.families import FAMILIES
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import SLOW_LINKS, X_BD, TwoLinears


def maker(hardware: Hardware = SLOW_DEVICES, annotated: bool = False) -> Callable[[Mesh], Plan]:
    """Plans of the smallest model on any mesh."""
    model = TwoLinears()
    if annotated:
        annotate(model, "up", tp="column")
    program = capture(model, (X_BD,), {})

    def make(mesh: Mesh) -> Plan:
        space = build_space(program, mesh, hardware)
        return make_plan(space, pins_of(annotations_of(model), space, "auto", {}))[0]

    return make


@pytest.mark.parametrize("hardware", [SLOW_DEVICES, SLOW_LINKS, load("cpu")], ids=lambda each: each.name)
@pytest.mark.parametrize(("devices", "max_axes"), [(4, 1), (4, 2), (8, 3), (6, 2), (1, 2), (2, 3)])
def test_the_best_mesh_is_the_best_of_all_meshes_planned_one_by_one(
    hardware: Hardware, devices: int, max_axes: int
) -> None:
    make = maker(hardware)
    found = best_mesh(make, "auto", devices, hardware, max_axes)
    each = [make(mesh) for mesh in meshes_of("auto", devices, hardware, max_axes)]
    assert found.seconds == min(plan.seconds for plan in each)
    assert found.mesh.num_devices == devices
    assert replace(found, notes=()) == next(plan for plan in each if plan.seconds == found.seconds)


def test_a_family_is_planned_on_every_mesh_of_eight_devices() -> None:
    family = FAMILIES["mlp"]
    program = capture(family.build(), *family.inputs(0))

    def make(mesh: Mesh) -> Plan:
        return make_plan(build_space(program, mesh, load("h100")), {})[0]

    found = best_mesh(make, "auto", 8, "h100", max_axes=3)
    assert found.mesh.hardware == "h100"
    (note,) = found.notes
    assert note.startswith("the best of 4 meshes of 8 devices:\n")
    assert all(text in note for text in ("dp=8", "dp=2 × tp=4", "dp=4 × tp=2", "dp=2 × tp=2 × sp=2"))
    assert note in str(found)


@pytest.mark.parametrize("number", [1, 2, 12, 64, 97])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_factorizations_are_all_ordered_products_of_factors_above_one(number: int, count: int) -> None:
    def divide(rest: int, left: int) -> set[tuple[int, ...]]:
        if left == 1:
            return {(rest,)} if rest > 1 or count == 1 else set()
        return {(f, *tail) for f in range(2, rest + 1) if rest % f == 0 for tail in divide(rest // f, left - 1)}

    found = list(factorizations(number, count))
    assert set(found) == divide(number, count) and len(found) == len(set(found))
    assert all(math.prod(sizes) == number for sizes in found)


def test_meshes_come_with_few_axes_first_and_both_orders() -> None:
    meshes = meshes_of("auto", 6, SLOW_LINKS, 2)
    assert [str(mesh) for mesh in meshes] == ["dp=6", "dp=2 × tp=3", "dp=3 × tp=2"]
    assert {mesh.hardware for mesh in meshes} == {SLOW_LINKS.name}


def test_a_mesh_without_a_plan_is_listed_with_the_reason() -> None:
    found = best_mesh(maker(annotated=True), "auto", 4, SLOW_DEVICES, 2)
    assert str(found.mesh) == "dp=2 × tp=2"
    line = next(line for line in found.notes[0].splitlines() if line.startswith("dp=4"))
    assert 'the mesh has no axis "tp"' in line


def test_a_search_without_any_plan_says_why_for_each_mesh() -> None:
    def make(mesh: Mesh) -> Plan:
        raise InfeasibleError(f"nothing fits {mesh.ndim} axes")

    with pytest.raises(InfeasibleError) as raised:
        best_mesh(make, "auto", 4)
    assert str(raised.value) == (
        "no mesh of 4 devices has a plan; on each of them:\n"
        "  dp=4: nothing fits 1 axes\n  dp=2 × tp=2: nothing fits 2 axes"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("auto", None), "found devices=None"),
        (("auto", 0), "found devices=0"),
        (("auto", 6.0), "found devices=6.0"),
        (("auto", True), "found devices=True"),
        (("2x2", 4), "mesh='2x2'; give a DeviceMesh"),
        (("auto", 4, None, 0), "max_axes=0; a mesh is searched for in 1 to 3 axes"),
        (("auto", 4, None, 4), "max_axes=4"),
    ],
)
def test_what_names_no_meshes_is_refused(arguments: tuple, text: str) -> None:
    with pytest.raises(MeshError) as raised:
        best_mesh(maker(), *arguments)
    assert text in str(raised.value)


def test_the_api_searches_with_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def counting(*arguments: Any, **options: Any) -> Any:
        captured.append(arguments)
        return trace(*arguments, **options)

    monkeypatch.setattr("autopar.compiler.offline.trace", counting)
    found = autopar.plan(TwoLinears(), "auto", (X_BD,), devices=4, hardware="a100", max_axes=2)
    assert len(captured) == 1 and "the best of 2 meshes of 4 devices" in found.notes[0]
    each = [autopar.plan(TwoLinears(), mesh, (X_BD,)) for mesh in meshes_of("auto", 4, "a100", 2)]
    assert found.seconds == min(plan.seconds for plan in each) and found.verify().ok


def test_compiling_on_a_mesh_that_is_to_be_found_says_how_to_find_it() -> None:
    with pytest.raises(MeshError, match=r"init_device_mesh\(device_type, plan\.mesh\.sizes"):
        autopar.compile(TwoLinears(), "auto", (X_BD,))  # type: ignore[arg-type]
