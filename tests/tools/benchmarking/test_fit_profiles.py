"""The fit of what GPUs reach: numbers come back, and machines are told apart by what runs say of themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.costs.hardware.collectives import collective_seconds, message_seconds
from autopar.costs.hardware.load import load
from autopar.ir.sharding.mesh import Mesh
from benchmarks.fit_profiles import begin, hardware_of, nearest
from benchmarks.publications.ledger import RowLedger
from benchmarks.publications.machines import VTRAIN_BYTES_PER_S, Machine, machine_name, variant_of
from benchmarks.publications.machines import hardware_of as on_its_machine
from benchmarks.publications.planning import predicted
from benchmarks.publications.rows import Row, Shape
from benchmarks.publications.strategies import pinned

SHAPE = Shape("llama", 2, 64, 4, 4, 128, 100)
ROW = Row("nanotron", "one", "nanotron", SHAPE, 128, 1, 1, "h100_80gb", seconds=1.0)


@pytest.mark.parametrize(
    ("bandwidth", "name"),
    [(460e9, "nanotron"), (425e9, "nanotron, checked"), (45e9, "nanotron, no NVLink"), (None, "nanotron")],
)
def test_the_states_of_a_cluster_are_told_apart_by_the_bandwidth_in_a_node(bandwidth: float | None, name: str) -> None:
    found = {} if bandwidth is None else {"intra_all_reduce": bandwidth}
    assert machine_name(replace(ROW, bandwidths=found)) == name
    assert machine_name(replace(ROW, source="korthikanti", bandwidths=found)) == "korthikanti"


def test_a_machine_replaces_what_it_differs_in_and_nothing_else() -> None:
    h100 = load("h100")
    assert Machine().of(h100) == h100
    slower = Machine(1e10, 1e11).of(h100)
    assert [each.bytes_per_s for each in slower.links] == [1e11, 1e10]
    assert replace(slower, links=h100.links) == h100
    assert Machine(network_bytes_per_s=1e15).of(h100) == h100, "a profile's own links are not made faster"


def test_a_run_whose_collectives_are_checked_has_the_variant_of_its_profile() -> None:
    found = [variant_of(replace(ROW, bandwidths={"intra_all_reduce": each})) for each in (460e9, 425e9, 45e9)]
    assert found == ["", ":debug", ":debug"]


def test_messages_between_stages_begin_as_late_as_a_machine_says_and_collectives_do_not() -> None:
    h100, late = load("h100"), Machine(message_s=0.5).of(load("h100"))
    mesh = Mesh({"pp": 2, "dp": 8}, "h100")
    assert message_seconds(0, mesh, "pp", late) == pytest.approx(0.5)
    assert message_seconds(10**8, mesh, "pp", late) - 0.5 == pytest.approx(0.0, abs=0.05)
    assert message_seconds(0, mesh, "pp", h100) < 1e-4
    assert collective_seconds("all_gather", 1, mesh, "dp", late) == collective_seconds(
        "all_gather", 1, mesh, "dp", h100
    )


def test_a_row_of_several_nodes_of_vtrain_has_the_cards_that_its_source_says() -> None:
    row = replace(ROW, source="vtrain several nodes")
    assert on_its_machine(row, load("a100")).links[1].bytes_per_s == VTRAIN_BYTES_PER_S == 12.5e9
    numbers, a100 = begin([row]), load("a100")
    fitted = hardware_of(numbers, row, a100)
    assert fitted.links[1].bytes_per_s == VTRAIN_BYTES_PER_S and fitted.launch_s == numbers["launch"]
    assert fitted.attention_efficiency * fitted.product_efficiency == pytest.approx(
        a100.attention_efficiency * a100.product_efficiency
    ), "published, and not fitted"
    assert fitted.links[1].efficiencies == a100.links[1].efficiencies


def test_the_network_of_a_profile_is_fitted_to_the_rows_of_a_cluster_and_checks_to_those_with_them() -> None:
    h100, numbers = load("h100"), begin([ROW])
    fitted = hardware_of(numbers, ROW, h100)
    reached = fitted.links[1].efficiencies
    assert reached.all_reduce == numbers["network"]
    assert reached.all_gather == reached.reduce_scatter == numbers["network"] * numbers["gathered"]
    assert fitted.links[1].straggling_s == numbers["late in network"] and fitted.links[0] == h100.links[0]
    assert hardware_of(begin([ROW], checked=True), ROW, h100) == replace(h100, collective_check_s=3.2e-4)


def test_llm_foundry_ran_slower_kernels_of_attention() -> None:
    row = replace(ROW, source="llm-foundry")
    h100, found = load("h100"), load(f"h100{variant_of(row)}")
    assert found.attention_efficiency < h100.attention_efficiency
    assert on_its_machine(row, found) == replace(h100, attention_efficiency=found.attention_efficiency)


def test_nemo_ran_transformer_engine_whose_variant_is_the_h100s_alone() -> None:
    found = [variant_of(replace(ROW, source="nemotron4", device=device)) for device in ("h100-80gb", "gb200")]
    assert found == [":te", ""]


def test_a_ledger_prices_checks_as_a_plan_does() -> None:
    row, h100, checked = replace(ROW, tp=2, sequence_parallel=True), load("h100"), load("h100:debug")
    telling = replace(h100, links=tuple(replace(link, straggling_s=1e-9) for link in h100.links))
    ledger = RowLedger.of(row, telling)
    planned = [predicted(pinned(row), (SHAPE.layers,), each).seconds(1) for each in (h100, checked)]
    assert planned[1] > 1.5 * planned[0]
    assert [ledger.seconds(each) for each in (h100, checked)] == pytest.approx(planned, rel=0.02)


def test_numbers_that_rows_agree_on_come_back_and_those_they_say_nothing_of_stay() -> None:
    slopes = np.array([[1.0, 0.0], [2.0, 0.0], [0.5, 0.0]])
    move = nearest(-slopes @ [0.3, 0.0], slopes, np.zeros(2), np.array([1e-6, 0.25]))
    assert move == pytest.approx([0.3, 0.0])
    assert nearest(np.zeros(3), slopes, np.array([0.0, 0.4]), np.array([1e-6, 0.25])) == pytest.approx([0.0, -0.4])


def test_a_row_that_is_far_off_counts_for_less_than_a_mean_would_have_it() -> None:
    off, slopes = np.array([0.0] * 9 + [3.0]), np.ones((10, 1))
    (move,) = nearest(off, slopes, np.zeros(1), np.array([1e-6]))
    assert -0.3 < move < 0.0
