"""The rule of an MLP in tiles, on ranks played in one process, and its place among columns and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.capture.export import capture
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from autopar.planning.settings import context_of
from autopar.strategies.presets.regions import ROW, regions_of
from autopar.strategies.roles import RoledProgram
from autopar.tools.validation.check_rule import check_rule
from tests.support.gated_mlps import Gated, tokens
from tests.support.loss_alone import LOSS_ALONE

NAME = "mlp_in_tiles_default"


def given(biases: bool, gated: bool) -> list[Any]:
    torch.manual_seed(0)
    gate = ((12, 8), (12,)) if gated else (None, None)
    shapes = [(4, 6, 8), (12, 8), (12,), *gate, (8, 12), (8,)]
    if not biases:
        shapes[2::2] = [None] * 3
    return [None if shape is None else torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("biases", "gated"), [(True, True), (False, True), (True, False), (False, False)])
def test_rows_and_hidden_features_may_be_split(biases: bool, gated: bool) -> None:
    found = check_rule(MLP_IN_TILES, *given(biases, gated), "silu", 3)
    assert [each.partition(":")[0] for each in found] == ["a", "b", "k", "-"]
    k = found[2]
    first = ["S(0)", *["S(0)"] * biases] * (1 + gated)
    assert k == f"k: {', '.join(['R', *first, 'S(1)', *['P'] * biases])} -> P"


def test_its_dims_have_the_roles_that_annotations_name() -> None:
    program = capture(Gated().float(), (), {"x": tokens()["x"].float()}, mlp_tiles=2)
    assert RoledProgram.of(program).calls[NAME].roles == {"a": "data", "b": "sequence", "k": "row"}


@pytest.mark.parametrize(("parts", "divides"), [(4, True), (3, False)])
def test_a_preset_of_columns_splits_hidden_features_where_they_divide(parts: int, divides: bool) -> None:
    program = capture(Gated(), (), {"x": tokens()["x"].float()}, mlp_tiles=2)
    regions = regions_of(RoledProgram.of(program), parts)
    assert regions.names(ROW) == [NAME, f"{NAME}_1"] * divides
    assert regions.factors.get(NAME) == ("k" if divides else None)


@pytest.mark.parametrize(
    ("strategy", "axes", "choice"),
    [
        ("tensor_2d", ("r", "c"), "a k"),
        ("tensor_2_5d", ("z", "r", "c"), "a a k"),
        ("tensor_3d", ("s", "i", "o"), "a a k"),
        ("megatron_sequence", ("dp", "tp"), "a k"),
    ],
)
def test_a_preset_leaves_no_axis_without_work(strategy: str, axes: tuple[str, ...], choice: str) -> None:
    mesh, x = autopar.Mesh(dict.fromkeys(axes, 2)), {"x": tokens(batch=8)["x"].float()}
    assert autopar.plan(Gated(), mesh, x, strategy=strategy, memory=autopar.Memory(mlp_tiles=2)).choices[NAME] == choice


def test_positions_that_attention_shards_by_zigzag_stay_zigzag() -> None:
    family = LOSS_ALONE["llama_loss"]
    plan = autopar.plan(
        family.build(),
        autopar.Mesh({"cp": 2}),
        family.inputs(0)[1],
        strategy="ring",
        memory=autopar.Memory(mlp_tiles=2),
    )
    space = context_of(plan).space
    decision = space.decisions[space.index[NAME]]
    strategy = next(each for each in decision.candidates.strategies if str(each) == plan.choices[NAME])
    assert [str(layout) for layout in strategy.inputs] == ["Z(1)", "R", "R", "R"]


def test_it_takes_the_time_of_hidden_activations_that_are_computed_again() -> None:
    plans = [
        autopar.plan(
            Gated(64, 256),
            autopar.Mesh({"dp": 2}),
            {"x": tokens(size=64)["x"].float()},
            memory=autopar.Memory(mlp_tiles=tiles),
        )
        for tiles in (1, "none")
    ]
    ours, theirs = ([row for row in plan.rows if row.kind == "call"] for plan in plans)
    _, mlp = (row for row in ours if row.operation == "mlp_in_tiles")
    apart = [row.forward_seconds for row in theirs if row.operation in ("linear", "silu", "mul")]
    assert len(apart) == 10
    latency = context_of(plans[0]).space.hardware.op_latency_s
    assert mlp.forward_seconds == pytest.approx(sum(apart) / 2 - 4 * latency, rel=0.02)
    # Three products forward; backward two of them again, and two for each of the three, and the sum with the gradient
    # of the residual.
    assert mlp.backward_seconds == pytest.approx(8 / 3 * mlp.forward_seconds, rel=0.03)
