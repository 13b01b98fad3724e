"""Models of transformers whose backward is their own (autograd.Functions): captured, split by a rule, and trained."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import capture
from autopar.ir.program.autograd_function import FunctionCall
from autopar.strategies.roles import RoledProgram
from tests.runtime.rewrite.test_simulated import Annotations, assert_equal, on_one_process, on_simulated_ranks
from tests.support.families import FAMILIES, Family

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32}


def _bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(**SIZES, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0))


def _recurrent_gemma() -> nn.Module:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "lru_width": 32}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SIZES, **sizes, attention_window_size=8))


def _yoso() -> nn.Module:
    from transformers import YosoConfig, YosoForMaskedLM

    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    return YosoForMaskedLM(YosoConfig(**SIZES, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _inputs(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(3, 32, (8, 4), generator=torch.Generator().manual_seed(seed))
    return (), {"input_ids": ids, "labels": ids}


PINS: dict[str, Annotations] = {
    "bloom": (("query_key_value", {"tp": "column"}), ("self_attention.dense", {"tp": "row"})),
    "recurrent_gemma": (
        ("*", {"dp": "data", "sp": "data"}),
        ("linear", {"tp": "column"}),
    ),  # else solving takes minutes
    "yoso": (),
}


def _family(name: str) -> Family:
    build = {"bloom": _bloom, "recurrent_gemma": _recurrent_gemma, "yoso": _yoso}[name]

    def built(**_: Any) -> nn.Module:
        torch.manual_seed(0)
        return build().train()

    return Family(name, built, _inputs, lambda output: output.loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "recurrent_gemma", "yoso"])
def test_a_family_with_functions_trains_as_one_process_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, name, _family(name))
    assert_equal(on_simulated_ranks(name, PINS[name]), on_one_process(name))
    program = capture(FAMILIES[name].build(), *_inputs(0))
    calls = [call for call in RoledProgram.of(program).calls.values() if isinstance(call.call.target, FunctionCall)]
    assert calls and all(call.bound.splittable and not call.ruled.reason for call in calls)


def test_heads_of_bloom_are_split() -> None:
    model, (_, inputs) = _bloom(), _inputs(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # megatron warns of attention that stays whole
        plan = autopar.plan(model, autopar.Mesh({"tp": 4}, hardware="cpu"), inputs, strategy="megatron")
    products = [row for row in plan.rows if row.name.startswith("matmul")]
    assert len(products) == 4
    assert all(row.layout == "S(1)" for row in products), products


def _positive(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) / 8


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bloom.modeling_bloom.GeLUFunction", lambda: [_positive(4, 6)]),
        ("recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative", lambda: [_positive(4, 6)]),
        (
            "yoso.modeling_yoso.YosoCumulation",
            lambda: [*(_positive(2, 4) for _ in "qk"), *(_positive(2, 4, 6) for _ in "qkv"), {"hash_code_len": 2}],
        ),
    ],
)
def test_the_rules_of_library_functions_are_right(name: str, arguments: Callable[[], list[Any]]) -> None:
    module, _, function = f"transformers.models.{name}".rpartition(".")
    ways = autopar.check_rule(getattr(importlib.import_module(module), function), *arguments())
    assert len(ways) > 2
