"""MLPs in tiles: trained on ranks as on one process without tiles, with the bytes that plans predict."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from tests.support import pipeline_training
from tests.support.gated_mlps import Gated, tokens
from tests.support.parity import SLOW_DEVICES, Case, check, check_rounding
from tests.support.ranks import Ranks
from tests.support.simulation.training import Steps, train_alike, train_alone, train_on_ranks
from tests.support.slow_cases import slow_where

COMBINATIONS: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "chosen": (True, {}, {}),
    "samples and hidden features": (False, {}, {"dp": "data", "tp": "row"}),
    "positions and hidden features": (True, {}, {"dp": "sequence", "tp": "row"}),
    "hidden features over both axes": (True, {}, {"dp": "row", "tp": "row"}),
    "zero3": (False, {"strategy": "zero3"}, {}),
    "fsdp_megatron": (True, {"strategy": "fsdp_megatron"}, {}),
    "megatron_sequence": (False, {"strategy": "megatron_sequence"}, {}),
    "tensor_2d": (True, {"strategy": "tensor_2d"}, {}),
    "micro-batches": (True, {"microbatches": 2}, {"dp": "data", "tp": "row"}),
    "computed again": (False, {"recompute": "full"}, {"dp": "data", "tp": "row"}),
    "computed again, but products": (False, {"recompute": "selective"}, {"dp": "data", "tp": "row"}),
}
"""Name → whether the model has biases, options of `compile`, annotations of the MLPs."""


SLOW = ("samples and hidden features", "megatron_sequence", "tensor_2d", "computed again, but products")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_where(COMBINATIONS, *SLOW))
def test_any_split_trains_and_evaluates_as_one_process(name: str) -> None:
    bias, options, roles = COMBINATIONS[name]
    torch.manual_seed(0)
    model = Gated(bias=bias).double()
    if roles:
        autopar.annotate(model, "layers.*.down", **roles)
    batches = [tokens(seed) for seed in range(2)]
    steps = Steps(batches, "adamw", num_microbatches=options.get("microbatches", 1), evaluated=True)
    plan = train_alike(model, steps, {"dp": 2, "tp": 2}, {"mlp_tiles": 3, **options})
    assert plan.choices["mlp_in_tiles_default"].count("-") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", (2,), options={"hardware": SLOW_DEVICES, "strategy": "ring", "mlp_tiles": 3}, steps=2),
        pytest.param(
            Case("gpt2", (2, 2), options={"hardware": SLOW_DEVICES, "strategy": "megatron", "mlp_tiles": 3}, steps=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case("bert", (2,), options={"hardware": SLOW_DEVICES, "strategy": "zero3", "mlp_tiles": 3}, steps=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_family_trains_as_on_one_process(ranks: Ranks, case: Case) -> None:
    found, *_ = check(ranks, case)
    assert case.family != "llama" or ("call", "dp", "sequence") in found.roles


@pytest.mark.slow
def test_one_in_bfloat16_rounds_no_worse_than_one_process(ranks: Ranks) -> None:
    case = Case("llama", (2,), options={"strategy": "zero3", "mlp_tiles": 4}, dtype=torch.bfloat16, steps=2)
    check_rounding(ranks, case)


def test_parameters_in_float32_compute_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = Gated()
    options = {"precision": "bf16-mixed", "strategy": "megatron"}
    steps = Steps([{name: x.float() for name, x in tokens(seed).items()} for seed in range(2)])
    ours, theirs = (
        train_on_ranks(copy.deepcopy(model), steps, {"tp": 2}, {**options, "mlp_tiles": tiles}) for tiles in (3, "none")
    )
    assert ours.plan is not None and "bfloat16" in ours.plan.descriptions["mlp_in_tiles_default"]
    exact = train_alone(copy.deepcopy(model).double(), Steps([tokens(seed) for seed in range(2)]))
    for name, gradients in exact.gradients.items():
        one, other = (_distance(each.gradients[name], gradients) for each in (ours, theirs))
        assert one <= 1.2 * other + 1e-6, name


def _distance(found: list[Tensor] | None, expected: list[Tensor] | None) -> float:
    assert found is not None and expected is not None
    return float((found[0].double() - expected[0]).norm())


@pytest.mark.parametrize(
    ("mesh", "schedule"), [pytest.param("pp2xtp2", "1f1b", marks=pytest.mark.slow), ("pp2", "zbv")]
)
def test_it_goes_with_pipelines(ranks: Ranks, mesh: str, schedule: str) -> None:
    pipeline_training.check(
        ranks, pipeline_training.PipelineCase("llama", mesh, schedule, options={"mlp_tiles": 2}, steps=2)
    )
