"""Pipelines train as one process that accumulates gradients over the same micro-batches.

The whole matrix is marked slow; the fast selection touches every family, every schedule and every mesh.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.pipeline_training import MESHES, SCHEDULES, PipelineCase, check, check_rounding
from tests.support.ranks import Ranks

EIGHT = "pp2xdp2xtp2"
FAMILIES = ("gpt2", "llama", "t5", "unet", "mlp", "resnet", "lora")

FAST: tuple[tuple[str, str, str], ...] = (
    ("gpt2", "pp2", "1f1b"),
    ("gpt2", "pp2xtp2", "interleaved_1f1b"),
    ("llama", "pp2", "zbv"),
    ("llama", "pp2xdp2", "gpipe"),
    ("t5", "pp2", "interleaved_zero_bubble"),
    ("t5", "pp4", "1f1b"),
    ("unet", "pp2", "dualpipev"),
    ("mlp", "pp2xtp2", "zbv"),
    ("resnet", "pp2", "1f1b"),
    ("lora", "pp2", "interleaved_1f1b"),
    ("mlp", EIGHT, "1f1b"),
)


def matrix() -> Iterator[tuple[str, str, str]]:
    """Every family on every mesh of up to four ranks by every schedule; two schedules on eight."""
    for family in FAMILIES:
        for mesh in MESHES:
            for schedule in SCHEDULES if mesh != EIGHT else ("1f1b", "zbv"):
                yield family, mesh, schedule


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "mesh", "schedule"), FAST)
def test_every_family_mesh_and_schedule_train_as_one_process(
    ranks: Ranks, family: str, mesh: str, schedule: str
) -> None:
    check(ranks, PipelineCase(family, mesh, schedule, steps=2))


def test_an_interleaved_schedule_runs_one_stage_per_rank_too(ranks: Ranks) -> None:
    check(ranks, PipelineCase("mlp", "pp2", "interleaved_zero_bubble", options={"stages_per_rank": 1}, steps=2))


def test_stages_divide_their_experts(ranks: Ranks) -> None:
    check(ranks, PipelineCase("qwen3_moe", "pp2xdp2", "1f1b", steps=2))


def test_the_fast_selection_holds_every_family_mesh_and_schedule() -> None:
    assert set(FAST) <= set(matrix())
    families, meshes, schedules = map(set, zip(*FAST, strict=True))
    assert (families, meshes, schedules) == (set(FAMILIES), set(MESHES), set(SCHEDULES))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "schedule"), matrix())
def test_a_family_trains_through_a_pipeline_as_on_one_process(
    ranks: Ranks, family: str, mesh: str, schedule: str
) -> None:
    check(ranks, PipelineCase(family, mesh, schedule))


PRESETS: tuple[tuple[str, str, str], ...] = (
    ("data_parallel", "pp2xdp2", "1f1b"),
    ("zero1", "pp2xdp2", "1f1b"),
    ("zero2", "pp2xdp2", "1f1b"),
    ("zero2", "pp2xdp2", "zbv"),
    ("zero3", "pp2xdp2", "1f1b"),
    ("zero3", "pp2xdp2", "zbv"),
    ("megatron", "pp2xtp2", "interleaved_1f1b"),
    ("megatron_sequence", "pp2xtp2", "1f1b"),
    ("async_tensor_parallel", "pp2xtp2", "1f1b"),
    ("fsdp_megatron", EIGHT, "1f1b"),
)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:zero1", "ignore:megatron")
@pytest.mark.parametrize(
    ("strategy", "family", "mesh"),
    [("zero2", "llama", "pp2xdp2"), ("megatron_sequence", "gpt2", "pp2xtp2"), ("zero3", "llama", EIGHT)],
)
def test_presets_go_with_a_pipeline(ranks: Ranks, strategy: str, family: str, mesh: str) -> None:
    check(ranks, PipelineCase(family, mesh, options={"strategy": strategy}, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "family", "mesh"), [("sp+cp", "llama", "pp2xcp2xtp2"), ("fsdp+ep", "qwen3_moe", "pp2xdp2xep2")]
)
def test_joined_presets_go_with_a_pipeline(ranks: Ranks, strategy: str, family: str, mesh: str) -> None:
    check(ranks, PipelineCase(family, mesh, options={"strategy": strategy}, steps=2))


def test_positions_that_are_zigzag_go_through_stages_without_attention(ranks: Ranks) -> None:
    check(ranks, PipelineCase("gpt2", "pp2xtp2", "interleaved_1f1b", options={"strategy": "ring"}, steps=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zero1", "ignore:megatron")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("strategy", "mesh", "schedule"), PRESETS)
def test_a_preset_goes_with_a_pipeline(ranks: Ranks, strategy: str, family: str, mesh: str, schedule: str) -> None:
    check(ranks, PipelineCase(family, mesh, schedule, options={"strategy": strategy}))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "schedule", "recompute"), [("gpt2", "1f1b", "selective"), ("llama", "zbv", "full")])
def test_stages_are_computed_again_in_the_backward(ranks: Ranks, family: str, schedule: str, recompute: str) -> None:
    check(ranks, PipelineCase(family, "pp2", schedule, options={"recompute": recompute}, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("mesh", ["pp2", "pp2xdp2"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "mlp"])
def test_every_family_is_computed_again_in_the_backward(
    ranks: Ranks, family: str, mesh: str, schedule: str, recompute: str
) -> None:
    check(ranks, PipelineCase(family, mesh, schedule, options={"recompute": recompute}))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_pipeline_in_bfloat16_rounds_no_worse_than_one_process(ranks: Ranks, schedule: str) -> None:
    check_rounding(ranks, PipelineCase("llama", "pp2", schedule, dtype=torch.bfloat16, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_a_family_in_bfloat16_rounds_no_worse_in_a_pipeline(ranks: Ranks, family: str, schedule: str) -> None:
    check_rounding(ranks, PipelineCase(family, "pp2xdp2", schedule, dtype=torch.bfloat16, steps=3))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_the_first_stage_may_be_frozen(ranks: Ranks, schedule: str) -> None:
    # Four stages on two ranks, so that each rank has something to train.
    check(ranks, PipelineCase("mlp", "pp2", schedule, frozen=(".0.", ".1.", ".2."), steps=2))
