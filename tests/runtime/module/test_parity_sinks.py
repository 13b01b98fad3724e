"""GPT-OSS, whose attention has sinks and a window in every second layer, trains on ranks as on one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.expert_families import NUM_EXPERTS
from tests.support.simulation.training import Steps, Training, fault_of, train_alone, train_on_ranks

pytest.importorskip("transformers")

WINDOW, SEQUENCE, VOCABULARY = 4, 16, 64


class Model(nn.Module):
    """A tiny GPT-OSS, of two query heads to a head of keys, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GptOssConfig, GptOssForCausalLM

        config = GptOssConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            use_cache=False,
        )
        self.model = GptOssForCausalLM(config)
        self.model.set_experts_implementation("grouped_mm")

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=input_ids).loss


def built() -> Model:
    torch.manual_seed(0)
    model = Model()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model


def steps() -> Steps:
    torch.manual_seed(1)
    return Steps([{"input_ids": torch.randint(VOCABULARY, (4, SEQUENCE))} for _ in range(3)])


@functools.cache
def alone() -> Training:
    return train_alone(built(), steps())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    [
        ("megatron", {"tp": 4}, {"recompute": "full"}),  # more ranks than heads of keys
        ("zero3+cp", {"dp": 2, "cp": 2}, {}),
        ("data_parallel", {"dp": 2}, {}),
        ("zero3", {"dp": 4}, {}),
        ("megatron", {"tp": 2}, {}),
        ("zero3+tp+ep", {"dp": 1, "ep": 2, "tp": 2}, {}),
    ],
    ids=str,
)
def test_losses_gradients_and_parameters_are_those_of_one_process(
    strategy: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    found = train_on_ranks(built(), steps(), mesh, {"strategy": strategy, **options})
    assert not fault_of(found, alone(), relative=1e-4, absolute=1e-6)
    assert found.plan is not None
    assert [row.operation for row in found.plan.rows].count("attention_by_mask") == 2
    assert any(name.endswith("sinks") for name in found.gradients)
