"""LoRA of peft under presets that split products: the frozen base is split as without it, and adapters follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

peft = pytest.importorskip("peft")
IDS = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))

WEIGHTS = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
SIZES = {
    "up": (16, 32),
    "first": (16, 2),
    "second": (2, 32),
    "third": (16, 4),
    "fourth": (4, 32),
    "down": (32, 16),
    "narrow": (16, 4),
    "wide": (4, 16),
}


def _llama(dropout: float = 0.0) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    model.config.use_cache = False
    config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_follow_the_product_that_they_adapt(dropout: float) -> None:
    model, inputs = _llama(dropout), {"input_ids": IDS, "labels": IDS}
    plan = autopar.plan(model, Mesh({"tp": 2}, "h100"), inputs, strategy="megatron")
    nodes = context_of(plan).space.program.parameters
    for layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj"):
        found = {
            name.rpartition(f"{layer}.")[2]: plan.choices[node]
            for name, node in nodes.items()
            if f"layers.0.{'mlp' if layer[0] in 'gud' else 'self_attn'}.{layer}." in name
        }
        is_row = layer in ("o_proj", "down_proj")
        expected = ("S(1)", "S(1)", "I") if is_row else ("S(0)", "I", "S(0)")
        assert found == dict(zip(WEIGHTS, expected, strict=True)), layer


def test_two_adapters_of_one_product_follow_it_and_a_bottleneck_of_its_own_stays_a_pair() -> None:
    class Adapted(nn.Module):
        up: Any
        first: Any
        second: Any
        third: Any
        fourth: Any
        down: Any
        narrow: Any
        wide: Any

        def __init__(self) -> None:
            super().__init__()
            for name, (rows, columns) in SIZES.items():
                setattr(self, name, nn.Linear(rows, columns, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x) + self.second(self.first(x)) * 2 + self.fourth(self.third(x * 0.5))
            out = self.down(hidden.relu())
            return (out + self.wide(self.narrow(out.tanh()).relu())).square().mean()

    plan = autopar.plan(Adapted(), Mesh({"tp": 2}, "h100"), (torch.ones(4, 16),), strategy="megatron")
    nodes = context_of(plan).space.program.parameters
    found = {name.removesuffix(".weight"): plan.choices[node] for name, node in nodes.items()}
    columns, rows, whole_ones = ("up", "second", "fourth", "narrow"), ("down", "wide"), ("first", "third")
    assert found == dict.fromkeys(columns, "S(0)") | dict.fromkeys(rows, "S(1)") | dict.fromkeys(whole_ones, "I")


def _trained(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-4)
    found: dict[str, Any] = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS)["loss"]
        loss.backward()
        found |= {f"loss {step}": loss.detach()} | {
            f"gradient {step} of {name}": whole(each.grad) for name, each in model.named_parameters()
        }
        optimizer.step()
    return found | {name: whole(each) for name, each in model.named_parameters()}


def _parity(strategies: tuple[str, ...], shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    expected = _trained(_llama())
    for strategy in strategies:
        inputs = {"input_ids": IDS, "labels": IDS}
        model = autopar.compile(_llama(), mesh(shape, names), inputs, strategy=strategy, hardware=SLOW_DEVICES)
        found = _trained(model)
        assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, s=strategy: f"{s}: {text}")


def test_lora_trains_under_megatron_presets_as_on_one_process(ranks: Ranks) -> None:
    ranks.run(_parity, ("megatron_sequence",), (2,), ("tp",), timeout=240)


@pytest.mark.slow
def test_lora_trains_under_further_presets_as_on_one_process(ranks: Ranks) -> None:
    ranks.run(_parity, ("megatron", "async_tensor_parallel"), (2,), ("tp",), timeout=240)
    ranks.run(_parity, ("fsdp_megatron",), (2, 2), ("dp", "tp"), world_size=4, timeout=240)
