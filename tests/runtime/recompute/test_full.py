"""Recomputation runs collectives again: training equals one process, and moves the bytes that plans predict."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parity import SLOW_DEVICES, Case, check
from tests.support.pipeline_training import PipelineCase
from tests.support.pipeline_training import check as check_pipeline
from tests.support.ranks import Ranks


def _case(family: str, mesh: tuple[int, ...], strategy: str, micro_steps: int = 1, **options: Any) -> Case:
    specified = {"hardware": SLOW_DEVICES, "strategy": strategy, "recompute": "full", **options}
    return Case(family, mesh, options=specified, steps=3, micro_steps=micro_steps)


CASES = {
    "sequence parallel, ZeRO-3": _case("llama", (2, 2), "fsdp_megatron"),
    "regathered": _case("gpt2", (2,), "megatron_regather"),
    "ring": _case("llama", (2, 2), "ring"),
    "ulysses": _case("llama", (2,), "ulysses"),
    "sequence parallel": _case("llama", (2,), "megatron_sequence", micro_steps=2),
    "selective": _case("llama", (2, 2), "fsdp+sp", micro_steps=2, recompute="selective"),
    "tensor parallel": _case("t5", (2, 2), "megatron"),
    "experts": _case("mixtral", (2, 2), "expert_data"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process_and_moves_what_is_predicted(ranks: Ranks, name: str) -> None:
    for found in check(ranks, CASES[name]):
        assert found.counted


PIPELINES = {
    "1f1b": PipelineCase("llama", "pp2xtp2", "1f1b", options={"strategy": "megatron_sequence", "recompute": "full"}),
    "zero bubble": PipelineCase(
        "gpt2", "pp2xtp2", "zbv", options={"strategy": "megatron_sequence", "recompute": "full"}
    ),
    "ZeRO-3": PipelineCase("llama", "pp2xdp2", "1f1b", options={"strategy": "zero3", "recompute": "full"}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PIPELINES)
def test_stages_train_as_one_process(ranks: Ranks, name: str) -> None:
    check_pipeline(ranks, PIPELINES[name])
