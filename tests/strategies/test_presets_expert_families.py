"""Presets for experts on models in use: packed matrices, biases, every expert on all tokens.

Bytes are those of a plan on links without latency.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import autopar
from autopar.costs.hardware.profile import Link
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from tests.strategies.test_presets_volume import BYTES_ALONE
from tests.support.expert_families import EXPERT_HIDDEN, LLAMA4, NUM_EXPERTS, WITH_EXPERTS
from tests.support.expert_models import CHOSEN, EXPERTS, HIDDEN, Decoder
from tests.support.families import BATCH, SEQUENCE, Family
from tests.support.families import HIDDEN as FAMILY_HIDDEN
from tests.support.simulation.training import Steps, train_alike

pytest.importorskip("transformers")

FAMILIES: Mapping[str, Family] = {**WITH_EXPERTS, "llama4": LLAMA4}
GRID = {"ep": 2, "tp": 4}


@functools.cache
def planned(family: str, strategy: str = "expert_model", **mesh: int) -> Plan:
    source = FAMILIES[family]
    mesh = mesh or GRID
    return autopar.plan(source.build(), Mesh(mesh, "cpu"), source.inputs(0)[1], strategy=strategy, hardware=BYTES_ALONE)


def chosen(plan: Plan, *operations: str) -> list[str]:
    """The choices of the experts' calls of these kinds, in order."""
    rows = [row for row in plan.rows if row.kind == "call" and row.operation in operations]
    blocks = [
        row for row in rows if ("mlp" in row.module or "feed_forward" in row.module) and "shared" not in row.module
    ]
    return [plan.choices[row.name] for row in blocks]


def stored(plan: Plan) -> dict[str, str]:
    """Return the layout in which each parameter of the experts is stored."""
    rows = [row for row in plan.rows if row.kind == "parameter" and ".experts." in row.module]
    return {row.module.rpartition(".")[2]: plan.choices[row.name] for row in rows}


def test_gate_and_up_in_one_are_stored_in_parts_and_their_pieces_exchanged() -> None:
    plan = planned("mixtral")
    assert stored(plan) == {"gate_up_proj": "S(0) S(2)", "down_proj": "S(0) S(2)"}
    assert chosen(plan, "grouped_mm") == ["x o", "x o", "x k"]
    packed = 4 * NUM_EXPERTS * 2 * EXPERT_HIDDEN * FAMILY_HIDDEN
    assert plan.traffic["all_to_all", "tp"] == 2 * packed // 8  # forward and backward, of a part of 2 · 4


def test_biases_of_experts_are_columns_and_are_added_to_what_is_partial() -> None:
    plan = planned("gpt_oss")
    assert chosen(plan, "grouped_mm") == ["x o", "x k"]
    assert chosen(plan, "combine") == ["a0+x P0"]
    assert stored(plan)["gate_up_proj_bias"] == "S(0) S(1)"


def test_experts_that_see_all_tokens_gather_them_and_keep_them_in_parts_elsewhere() -> None:
    plan = planned("llama4", "expert_data", dp=2, ep=2)
    assert chosen(plan, "expand", "mul", "bmm", "sum") == ["b a", "b a", "m b", "m b", "b a", "m b", "b a"]
    tokens = 4 * BATCH * SEQUENCE * FAMILY_HIDDEN // 2
    assert plan.traffic["all_gather", "ep"] == plan.traffic["reduce_scatter", "ep"] == 2 * tokens
    assert chosen(planned("llama4"), "bmm") == ["b n", "b n", "b k"]


def test_rows_travel_in_parts_of_their_features_where_links_between_nodes_are_slow() -> None:
    links = (Link("inside", 4, 0.0, 1e9), Link("between", None, 0.0, 1e6))
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    plan = autopar.plan(
        Decoder(), Mesh(GRID, "cpu"), (ids, ids), strategy="expert_model", hardware=replace(BYTES_ALONE, links=links)
    )
    ends = [row for row in plan.rows if row.operation in ("dispatch", "combine")]
    assert [plan.choices[row.name] for row in ends] == ["a0+x d", "a0+x d"]
    rows = 4 * CHOSEN * ids.numel() * HIDDEN // 2
    assert plan.traffic["all_to_all", "ep"] == 4 * rows // 4 + 8 * EXPERTS


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("mixtral", "expert_model"),
        pytest.param("gpt_oss", "expert_model", marks=pytest.mark.slow),
        ("llama4", "expert_data"),
    ],
)
def test_families_train_on_ranks_as_on_one_process(family: str, strategy: str) -> None:
    source = FAMILIES[family]
    mesh = {"ep": 2, "tp": 2} if strategy == "expert_model" else {"dp": 2, "ep": 2}
    batches: list[Mapping[str, Tensor]] = [source.inputs(step)[1] for step in range(2)]
    steps = Steps(batches)
    train_alike(source.build(), steps, mesh, {"strategy": strategy})
