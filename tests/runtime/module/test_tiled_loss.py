"""Losses in tiles: trained on ranks as on one process without tiles, with the bytes that plans predict."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import pipeline_training
from tests.support.parity import SLOW_DEVICES, Case, check, check_rounding
from tests.support.ranks import Ranks

HEADS = {"llama_loss": "model.lm_head", "gpt2_loss": "model.lm_head", "bert_loss": "model.cls.predictions.decoder"}


def tiled(family: str, dp: str, tp: str, **options: Any) -> Case:
    """A case on a mesh of 2 by 2 whose head is split along these roles."""
    said = ((HEADS[family], {"dp": dp, "tp": tp}),)
    return Case(family, (2, 2), said, options={"hardware": SLOW_DEVICES, "loss_tiles": 3, **options}, steps=2)


@pytest.mark.parametrize(
    "case",
    [
        tiled("llama_loss", "data", "column", recompute="full"),
        tiled("gpt2_loss", "data", "sequence"),
        tiled("gpt2_loss", "sequence", "column"),  # 257 classes
        tiled("llama_loss", "column", "column", loss_tiles=1),
        tiled("bert_loss", "column", "data", loss_tiles="auto"),
    ],
    ids=str,
)
def test_a_family_trains_as_on_one_process(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


def test_one_in_bfloat16_rounds_no_worse_than_one_process(ranks: Ranks) -> None:
    case = Case("llama_loss", (2,), options={"strategy": "zero3", "loss_tiles": 4}, dtype=torch.bfloat16, steps=2)
    check_rounding(ranks, case)


@pytest.mark.parametrize(("mesh", "schedule"), [("pp2xtp2", "gpipe"), ("pp2", "zbv"), ("dp2", "")])
def test_it_goes_with_micro_batches_and_pipelines(ranks: Ranks, mesh: str, schedule: str) -> None:
    case = pipeline_training.PipelineCase("llama_loss", mesh, schedule, options={"loss_tiles": 2}, steps=2)
    pipeline_training.check(ranks, case)
