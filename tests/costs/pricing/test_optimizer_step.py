"""Computing and traffic of an optimizer step per parameter, by layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.hardware.load import load
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.pricing.optimizer_step import step_seconds, step_transfers
from autopar.errors import InputError
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh

MESH = Mesh({"tp": 2})
TWO = Mesh({"dp": 2, "tp": 4})
BANDWIDTH_BOUND = replace(load("cpu"), flops={"float32": 1e30}, memory_bytes_per_s=8.0, op_latency_s=0.0)
MATMUL_BOUND = replace(
    BANDWIDTH_BOUND, flops={"float32": 4.0, "bfloat16": 2.0}, memory_bytes_per_s=1e30, product_efficiency=1.0
)
MUON, GALORE = Optimizer("muon"), Optimizer("galore", rank=3)


def info(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> TensorInfo:
    return TensorInfo(shape, dtype, requires_grad)


def test_a_step_is_bound_by_memory_and_skips_frozen_parameters() -> None:
    def step(layout: str, requires_grad: bool = True) -> float:
        matrix = info(10, 6, requires_grad=requires_grad)
        return step_seconds(matrix, Layout.parse(layout), MESH, BANDWIDTH_BOUND, Optimizer(), False)

    traffic = 60 * (3 * 4 + 16)
    assert step("I") == traffic / 8.0
    assert step("S(1)") == traffic / 16.0
    assert step("I", requires_grad=False) == 0.0


def test_an_optimizer_of_another_kind_moves_other_bytes() -> None:
    def step(optimizer: Optimizer, dtype: torch.dtype = torch.float32, matrix: bool = False) -> float:
        found = info(10, 6, dtype=dtype)
        return step_seconds(found, Layout.parse("I"), MESH, BANDWIDTH_BOUND, optimizer, matrix) * 8.0

    assert step(Optimizer("sgd")) == 60 * 3 * 4
    assert step(Optimizer("none")) == 0.0
    assert step(Optimizer("adamw", master_copies=True), torch.bfloat16) == 60 * (3 * 2 + 2 * 8 + 2 * 4)
    assert step(MUON) == 60 * (3 * 4 + 16)
    assert step(MUON, matrix=True) == 60 * (3 * 4 + 8)
    assert step(GALORE, matrix=True) == pytest.approx(60 * 3 * 4 + 2 * 4 * 3 * (6 + 2 * 10))


def test_what_matrices_take_is_computed_on_the_whole_by_muon_and_in_parts_by_galore() -> None:
    def step(optimizer: Optimizer, layout: str) -> float:
        return step_seconds(info(10, 6), Layout.parse(layout), MESH, MATMUL_BOUND, optimizer, True)

    assert step(MUON, "I") == step(MUON, "S(0)") == 5 * (4 * 36 * 10 + 2 * 216) / 2.0
    assert step(GALORE, "I") == 2 * step(GALORE, "S(1)") == 4 * 60 * 3 / 4.0


def _moved(optimizer: Optimizer, layout: str, mesh: Mesh, *shape: int) -> tuple[Transfer, ...]:
    """Return what travels, without what is copied for it."""
    found = step_transfers(info(*shape), Layout.parse(layout), mesh, optimizer, True)
    return tuple(replace(each, packed=0, unpacked=0) for each in found)


def test_muon_gathers_what_is_in_parts_the_inner_axis_first() -> None:
    assert _moved(MUON, "I", MESH, 16, 8) == ()
    assert _moved(MUON, "S(0) S(0)", TWO, 16, 8) == (
        Transfer("all_gather", "tp", 16 * 8 * 2 // 2),
        Transfer("all_gather", "dp", 16 * 8 * 2),
    )


def test_galore_moves_the_basis_where_rows_are_split_and_what_is_projected_where_columns_are() -> None:
    assert _moved(GALORE, "S(0)", MESH, 16, 8) == (Transfer("all_gather", "tp", 8 * 4 * 4),)  # 3 of rank: 2 on a device
    four = replace(GALORE, rank=4)
    sums = Transfer("reduce_scatter", "tp", 16 * 4 * 4), Transfer("all_gather", "tp", 16 * 4 * 4)
    assert _moved(four, "S(1)", MESH, 16, 8) == sums
    assert _moved(four, "S(0)", MESH, 8, 16) == sums  # a wide matrix is a tall one, transposed
    assert _moved(four, "S(0) S(1)", TWO, 16, 8) == (
        Transfer("all_gather", "dp", 8 * 4 * 4 // 4),
        Transfer("reduce_scatter", "tp", 8 * 4 * 4),
        Transfer("all_gather", "tp", 8 * 4 * 4),
    )


def test_names_say_which_parameters_an_optimizer_takes_as_matrices() -> None:
    matrix = info(16, 8)
    assert MUON.takes("layers.0.up.weight", matrix) and not MUON.takes("head.weight", matrix)
    assert not MUON.takes("layers.0.up.weight", info(16, 8, requires_grad=False))
    assert not Optimizer().takes("layers.0.up.weight", matrix)
    assert GALORE.takes("layers.0.up.weight", matrix) and not GALORE.takes("layers.0.up.weight", info(16, 3))
    assert Optimizer("muon", matrices=("head.*",)).takes("head.weight", matrix)


@pytest.mark.parametrize(
    ("specified", "message"),
    [
        ({"name": "lion"}, "optimizer='lion' is not known; optimizers are 'adamw', .*'muon', 'galore'"),
        ({"name": "adamw", "rank": 4}, "optimizer='adamw' was given rank=4; \"galore\" takes one"),
        ({"name": "galore", "rank": 0}, 'rank=0; "galore" takes one, of at least 1'),
        ({"name": "sgd", "matrices": ("*",)}, r"optimizer='sgd' was given matrices=\('\*',\)"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(specified: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Optimizer(**specified)  # pyright: ignore[reportArgumentType]
