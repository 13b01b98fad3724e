"""Fifty steps of a Llama of four layers on ranks: the losses of one process, with every optimizer that saves memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.optim import GaLoreAdamW, Muon
from tests.support.optimizing import losses_of, planned_for
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

pytestmark = pytest.mark.slow

STEPS, RANK, VOCABULARY = 50, 8, 256
AXES = ("dp", "tp")


def _galore(model: nn.Module) -> torch.optim.Optimizer:
    return GaLoreAdamW(model.named_parameters(), lr=3e-3, rank=RANK, update_proj_gap=20)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(model.named_parameters(), lr=0.01, adamw_lr=1e-3)


def _adamw_of_8_bits(model: nn.Module) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim").AdamW8bit(model.parameters(), lr=1e-3)


MADE_BY: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "galore": _galore,
    "muon": _muon,
    "adamw-8bit": _adamw_of_8_bits,
}


def _model(adapted: bool) -> nn.Module:
    """Four layers; with `adapted`, LoRA's matrices are what is trained."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    if adapted:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))  # pyright: ignore[reportArgumentType]
    return model


def _batch(step: int) -> dict[str, torch.Tensor]:
    """Runs of consecutive numbers, which fifty steps can begin to learn."""
    first = torch.randint(VOCABULARY, (4, 1), generator=torch.Generator().manual_seed(step))
    ids = (first + torch.arange(32)) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return losses_of(optimizer, range(STEPS), lambda step: model(**_batch(step))[0])


def _on_ranks(kind: str, adapted: bool, shape: tuple[int, ...], strategy: str) -> list[float]:
    model = autopar.compile(
        _model(adapted),
        mesh(shape, AXES[: len(shape)]),
        _batch(0),
        strategy=strategy,
        optimizer=planned_for(kind, RANK),
        hardware=SLOW_DEVICES,
    )
    return _losses(model, MADE_BY[kind](model))


@pytest.mark.parametrize("adapted", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("kind", MADE_BY)
@pytest.mark.parametrize(("shape", "strategy"), [((2, 2), "fsdp_megatron"), ((2,), "zero3")], ids=["2x2", "2"])
def test_losses_of_fifty_steps_are_those_of_one_process(
    ranks: Ranks, kind: str, adapted: bool, shape: tuple[int, ...], strategy: str
) -> None:
    alone = _model(adapted)
    wanted = _losses(alone, MADE_BY[kind](alone))
    assert wanted[-1] < (wanted[0] if adapted else 0.8 * wanted[0])
    for found in ranks.run(_on_ranks, kind, adapted, shape, strategy, world_size=math.prod(shape), timeout=600):
        # Muon iterates in bfloat16, and what AdamW of 8 bits keeps is rounded to 256 values.
        torch.testing.assert_close(found, wanted, rtol=1e-3 if kind == "galore" else 2e-2, atol=0)
