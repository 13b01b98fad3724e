"""The abstract mesh: what it knows, what it refuses, and how it reads a DeviceMesh."""

import copy
import doctest
import pickle
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import autopar.ir.sharding.mesh
from autopar.errors import AutoparError, MeshError
from autopar.ir.sharding.mesh import Mesh, joined_axes
from tests.support.simulation.simulate import simulate


def test_a_mesh_knows_its_axes() -> None:
    mesh = Mesh({"pp": 2, "dp": 3, "tp": 4})
    assert (mesh.names, mesh.sizes) == (("pp", "dp", "tp"), (2, 3, 4))
    assert (mesh.num_devices, mesh.ndim, mesh.size("dp"), mesh.index("tp")) == (24, 3, 3, 2)
    assert str(mesh) == "pp=2 × dp=3 × tp=4"


def test_equal_meshes_have_equal_hashes() -> None:
    assert Mesh({"dp": 2, "tp": 4}) == Mesh({"dp": 2, "tp": 4})
    assert hash(Mesh({"dp": 2, "tp": 4})) == hash(Mesh({"dp": 2, "tp": 4}))
    assert Mesh({"dp": 2}, hardware="h100") != Mesh({"dp": 2}, hardware="cpu")
    assert Mesh({"dp": 2}) != Mesh({"dp": 4})


def test_several_axes_have_a_name_together() -> None:
    mesh = Mesh({"pp": 2, "dp": 3, "tp": 4})
    assert {name: mesh.positions(name) for name in ("tp", "dp_tp", "pp_tp", "pp_dp_tp")} == {
        "tp": (2,),
        "dp_tp": (1, 2),
        "pp_tp": (0, 2),
        "pp_dp_tp": (0, 1, 2),
    }
    with pytest.raises(MeshError, match="no axis 'tp_dp'; its axes are 'pp', 'dp', 'tp'"):
        mesh.positions("tp_dp")


def test_a_name_that_an_axis_has_too_or_that_could_be_read_twice_is_not_given_to_joined_axes() -> None:
    assert Mesh({"a": 2, "b": 2, "a_b": 2}).positions("a_b") == (2,)
    assert "a_b_c" not in joined_axes(("a", "b_c", "a_b", "c"))  # a and b_c, or a_b and c
    assert joined_axes(("dp",)) == {}


def test_the_order_of_the_axes_matters() -> None:
    assert Mesh({"dp": 2, "tp": 4}) != Mesh({"tp": 4, "dp": 2})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))])
def test_a_copied_mesh_is_equal(copied: Any) -> None:
    mesh = Mesh({"dp": 2, "tp": 4}, hardware="a100")
    assert copied(mesh) == mesh
    assert copied(mesh).sizes == (2, 4)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, 'a mesh without axes: name at least one, for example Mesh({"dp": 2}).'),
        ({"d p": 2}, "axis name 'd p' is not an identifier; use names such as 'dp' or 'tp'."),
        ({1: 2}, "axis name 1 is not an identifier; use names such as 'dp' or 'tp'."),
        ({"dp": 0}, "axis 'dp' has size 0; sizes are whole numbers of at least 1."),
        ({"dp": 2.0}, "axis 'dp' has size 2.0; sizes are whole numbers of at least 1."),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(axes: Any, message: str) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh(axes)
    assert str(caught.value) == message
    assert isinstance(caught.value, AutoparError) and isinstance(caught.value, ValueError)


def test_an_axis_of_another_name_is_refused() -> None:
    for ask in (Mesh.size, Mesh.index):
        with pytest.raises(MeshError) as caught:
            ask(Mesh({"dp": 2, "tp": 4}), "pp")
        assert str(caught.value) == "the mesh has no axis 'pp'; its axes are 'dp', 'tp'."


def test_a_mesh_of_a_mesh_is_itself() -> None:
    mesh = Mesh({"dp": 2})
    assert Mesh.of(mesh) is mesh


def test_a_device_mesh_is_read() -> None:
    with simulate(4):
        devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert Mesh.of(devices) == Mesh({"dp": 2, "tp": 2}, hardware="cpu")
        assert Mesh.of(devices, hardware="h200").hardware == "h200"


def test_a_device_mesh_without_names_is_refused() -> None:
    with (
        simulate(4),
        pytest.raises(MeshError, match=r"^the DeviceMesh has no axis names; create it with mesh_dim_names"),
    ):
        Mesh.of(init_device_mesh("cpu", (2, 2)))


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(autopar.ir.sharding.mesh) == (0, 4)
