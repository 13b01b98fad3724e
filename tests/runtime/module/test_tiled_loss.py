"""Losses in tiles: trained on ranks as on one process without tiles, with the bytes that plans predict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.runtime.implementations import tiled_loss
from tests.support import pipeline_training
from tests.support.loss_alone import Reader, reading
from tests.support.parity import SLOW_DEVICES, Case, check, check_rounding
from tests.support.ranks import Ranks
from tests.support.simulation.training import Steps, train_alike
from tests.support.slow_cases import slow_where

HEADS = {"llama_loss": "model.lm_head", "gpt2_loss": "model.lm_head", "bert_loss": "model.cls.predictions.decoder"}


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


def tiled(family: str, dp: str, tp: str, **options: Any) -> Case:
    """A case on a mesh of 2 by 2 whose head is split along these roles."""
    specified = ((HEADS[family], {"dp": dp, "tp": tp}),)
    return Case(family, (2, 2), specified, options={"hardware": SLOW_DEVICES, "loss_tiles": 3, **options}, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        tiled("llama_loss", "data", "column", recompute="full"),
        tiled("gpt2_loss", "data", "sequence"),
        tiled("gpt2_loss", "sequence", "column"),  # 257 classes
        tiled("llama_loss", "column", "column", loss_tiles=1),
        tiled("bert_loss", "column", "data", loss_tiles="always"),
    ],
    ids=str,
)
def test_a_family_trains_as_on_one_process(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), [("ring", (2,)), ("context_parallel", (2, 2))])
def test_positions_may_be_zigzag_by_zigzag(ranks: Ranks, strategy: str, mesh: tuple[int, ...]) -> None:
    options = {"hardware": SLOW_DEVICES, "strategy": strategy, "loss_tiles": 3}
    found, *_ = check(ranks, Case("llama_loss", mesh, options=options, steps=2))
    assert ("call", "dp" if len(mesh) == 1 else "tp", "sequence") in found.roles


@pytest.mark.slow
def test_one_in_bfloat16_rounds_no_worse_than_one_process(ranks: Ranks) -> None:
    case = Case("llama_loss", (2,), options={"strategy": "zero3", "loss_tiles": 4}, dtype=torch.bfloat16, steps=2)
    check_rounding(ranks, case)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "schedule"), [("pp2xtp2", "gpipe"), ("pp2", "zbv"), ("dp2", "")])
def test_it_goes_with_micro_batches_and_pipelines(ranks: Ranks, mesh: str, schedule: str) -> None:
    case = pipeline_training.PipelineCase("llama_loss", mesh, schedule, options={"loss_tiles": 2}, steps=2)
    pipeline_training.check(ranks, case)


COMBINATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "auto": ({}, {"loss_tiles": "always"}, {}),
    "zero3": ({"tied": True}, {"strategy": "zero3"}, {}),
    "fsdp_megatron": ({"num_classes": 23, "bias": True}, {"strategy": "fsdp_megatron"}, {}),
    "megatron_sequence": ({"num_classes": 23, "tied": True}, {"strategy": "megatron_sequence"}, {}),
    "positions and classes": ({"loss": shifted}, {}, {"dp": "sequence", "tp": "column"}),
    "positions over both axes": ({"loss": summed}, {}, {"dp": "sequence", "tp": "sequence"}),
    "micro-batches": ({"tied": True}, {"microbatches": 2}, {"dp": "data", "tp": "column"}),
}
"""Arguments of the model, options of `compile`, and annotations of the head."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_where(COMBINATIONS, "zero3", "fsdp_megatron", "micro-batches"))
def test_any_split_trains_and_evaluates_as_one_process(name: str) -> None:
    arguments, options, roles = COMBINATIONS[name]
    torch.manual_seed(0)
    model = Reader(**arguments).double()
    if roles:
        autopar.annotate(model, "head", **roles)
    batches = [reading(seed, num_classes=arguments.get("num_classes", 24)) for seed in range(3)]
    steps = Steps(batches, "adamw", num_microbatches=options.get("microbatches", 1), evaluated=True)
    plan = train_alike(model, steps, {"dp": 2, "tp": 2}, {"loss_tiles": 3, **options})
    assert plan.choices["linear_cross_entropy_default"].count("-") == 0


def test_a_rank_may_have_no_class_at_all() -> None:
    torch.manual_seed(0)
    model = Reader(num_classes=9, bias=True).double()  # in four parts of three, the last of which is padding
    steps = Steps([reading(seed, num_classes=9) for seed in range(2)])
    autopar.annotate(model, "head", tp="column")
    train_alike(model, steps, {"tp": 4}, {"loss_tiles": 3})


class Stacked(nn.Module):
    """A head that is one of the layers, which are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 24))])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers[0](x).flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_loss_in_a_layer_that_is_computed_again_is_not(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Stacked().double(), []
    steps = Steps([{"x": torch.randn(4, 8, 8, dtype=torch.float64), "labels": reading()["labels"]}])
    run = tiled_loss.loss_in_tiles
    monkeypatch.setattr(tiled_loss, "loss_in_tiles", lambda *given: calls.append(given) or run(*given))
    plan = train_alike(model, steps, {"dp": 2}, {"loss_tiles": 2, "recompute": mode, "strategy": "data_parallel"})
    assert plan.recompute == {"layers.0": mode}
    assert len(calls) == 1
