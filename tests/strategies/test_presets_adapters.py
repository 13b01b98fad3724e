"""Presets of tensor parallelism divide the frozen products of models with low-rank adapters, and train the adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.sharding.mesh import Mesh
from tests.support.families import FAMILIES
from tests.support.simulation.training import Steps, train_alike

peft = pytest.importorskip("peft")

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
COLUMNS = frozenset(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))


def adapted(*targets: str) -> nn.Module:
    """A small Llama with adapters that are not zero, whose base is frozen."""
    config = peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(FAMILIES["llama"].build(), config).double()  # rounding is not what is tested


@pytest.mark.sample(1)
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ATTENTION + MLP], ids=["two", "all"])
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sequence", "megatron_regather", "fsdp+sp"])
def test_frozen_products_are_columns_and_rows_and_adapters_follow_them(strategy: str, targets: tuple[str, ...]) -> None:
    ids = torch.zeros(4, 16, dtype=torch.int64)
    plan = autopar.plan(
        adapted(*targets), Mesh({"dp": 2, "tp": 2}, "cpu"), {"input_ids": ids, "labels": ids}, strategy=strategy
    )
    between = "replicated" if strategy == "megatron" else "sequence"
    roles = {row.module: row.roles[1] for row in plan.rows if row.operation == "linear" and ".layers." in row.module}
    assert len(roles) > 7
    for module, found in roles.items():
        column = any(name in module for name in COLUMNS)
        wanted = "column" if column else "row"
        if "lora_A" in module:
            wanted = between if column else "row"
        if "lora_B" in module:
            wanted = "column" if column else between
        assert found == wanted, module


@pytest.mark.slow
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ATTENTION + MLP], ids=["two", "all"])
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sequence", "megatron_regather", "fsdp+tp"])
def test_adapters_are_trained_on_ranks_as_on_one_process(strategy: str, targets: tuple[str, ...]) -> None:
    model, steps = adapted(*targets), Steps([FAMILIES["llama"].inputs(step)[1] for step in range(2)], "adamw")
    train_alike(model, steps, {"dp": 2, "tp": 2}, {"strategy": strategy})


class Halved(nn.Module):
    """Replacement of dropout, which draws other numbers on parts: a call between an input and the first adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


@pytest.mark.parametrize("strategy", ["megatron_regather", "async_tensor_parallel"])
def test_products_gather_their_input_together_next_to_adapters_behind_dropout(strategy: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "gate_proj"], lora_dropout=0.1)
    model, ids = peft.get_peft_model(FAMILIES["llama"].build(), config), torch.zeros(4, 16, dtype=torch.int64)
    plan = autopar.plan(model, Mesh({"tp": 2}, "cpu"), {"input_ids": ids, "labels": ids}, strategy=strategy)
    gate = next(row for row in plan.rows if row.module.endswith("0.mlp.gate_proj.base_layer") and row.kind == "call")
    assert plan.choices[gate.name] == f"...1+o via {strategy}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["megatron_regather", "async_tensor_parallel"])
def test_products_that_gather_together_next_to_adapters_train_as_on_one_process(strategy: str) -> None:
    model = adapted(*ATTENTION, *MLP)
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout = nn.ModuleDict(dict.fromkeys(module.lora_dropout, Halved()))  # pyright: ignore
    steps = Steps([FAMILIES["llama"].inputs(step)[1] for step in range(2)], "adamw")
    train_alike(model, steps, {"dp": 2, "tp": 2}, {"strategy": strategy})


def test_a_rank_holds_its_part_of_the_frozen_base() -> None:
    ids = torch.zeros(4, 16, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    plans = [
        autopar.plan(adapted("q_proj"), Mesh({"tp": 2}, "cpu"), batch, strategy=each)
        for each in ("fully_replicated", "megatron")
    ]
    whole, split = (plan.memory.parts["parameters"] for plan in plans if plan.memory is not None)
    assert split < 0.55 * whole
