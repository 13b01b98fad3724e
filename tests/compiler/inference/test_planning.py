"""Plans of generation: over one storage, priced by what a token reads, compared over meshes, from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.costs.hardware.load import load
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, InputError, StrategyError
from autopar.ir.sharding.layout import Layout, S
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from tests.support.generating import generating
from tests.support.options import by_flag

LOAD = {"batch": 4, "prompt": 12, "tokens": 20}
MESH = Mesh({"tp": 2}, hardware="h100")


def _planned(mesh: Any = MESH, layers: int = 1, **options: Any) -> Any:
    model = generating("llama", num_hidden_layers=layers)
    return autopar.plan_generation(
        model, mesh, **by_flag(**{**LOAD, "strategy": "megatron", "memory_conventions": "tensors", **options})
    )


def _stored(plan: Plan) -> Mapping[str, str]:
    names = context_of(plan).space.program.parameter_names
    return {names[node]: choice for node, choice in plan.choices.items() if node in names}


def test_a_prompt_keeps_to_the_storage_of_a_token() -> None:
    plan = _planned(strategy=None)
    assert _stored(plan.token) == _stored(plan.prompt)


def test_a_prompt_counts_the_weights_that_only_tokens_use() -> None:
    plan = _planned(layers=2)
    modules = {row.module for row in plan.prompt.rows if row.kind == "call"}
    assert "lm_head" not in modules and "lm_head" in {row.module for row in plan.token.rows if row.kind == "call"}
    assert plan.prompt.memory.parts["parameters"] == plan.token.memory.parts["parameters"]


@pytest.mark.filterwarnings("ignore:strategy='flash_decoding'")
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("megatron", Layout((S(1),))), ("flash_decoding", Layout((S(2),))), ("data_parallel", Layout((S(0),)))],
)
def test_the_cache_has_the_bytes_of_its_part(strategy: str, layout: Layout) -> None:
    plan = _planned(strategy=strategy)
    heads, features, keys_and_values, float_bytes = 2, 16, 2, 4
    whole = keys_and_values * LOAD["batch"] * heads * (12 + 20) * features * float_bytes
    assert plan.cache == layout and plan.cache_bytes == whole // 2
    inputs, frequencies = 3 * 8 * LOAD["batch"], features // 2 * float_bytes
    assert plan.token.memory.parts["buffers and inputs"] == plan.cache_bytes + inputs + frequencies


def test_a_token_takes_at_least_as_long_as_its_weights_and_its_cache_are_read() -> None:
    plan = _planned(batch=64, prompt=2000, tokens=48)
    profile = load("h100")
    head = 96 * 64 * 4  # the table of tokens, of which rows are looked up, and none is read whole
    read = plan.token.memory.parts["parameters"] - head // 2 + plan.cache_bytes
    assert plan.token.seconds >= read / profile.memory_bytes_per_s
    attention = sum(row.forward_seconds for row in plan.token.rows if row.operation == "cached_attention")
    latency = profile.op_latency_s
    assert attention - latency == pytest.approx(plan.cache_bytes / profile.product_bytes_per_s, rel=0.01)
    assert plan.tokens_per_second == 64 / plan.token.seconds
    assert plan.seconds_to_first == plan.prompt.seconds + plan.token.seconds


@pytest.mark.filterwarnings("ignore:megatron", "ignore:strategy='flash_decoding'")
def test_heads_that_do_not_divide_leave_the_cache_whole_or_divide_positions() -> None:
    mesh = Mesh({"tp": 4}, hardware="h100")
    assert not _planned(mesh, layers=2).cache.is_split
    assert _planned(mesh, strategy="flash_decoding").cache == Layout((S(2),))


@pytest.mark.slow
def test_the_mesh_of_the_most_tokens_is_taken_whose_first_token_comes_in_time() -> None:
    plan = _planned("auto", devices=4, hardware="h100", strategy=None, within=1.0)
    text = str(plan)
    assert all(each in text for each in ("first token", "tokens/s", "cache", "dp=2 × tp=2", "dp=4"))
    with pytest.raises(InfeasibleError, match=r"no mesh of 4 devices .* within 0\.0 µs(?s:.*)comes too late"):
        _planned("auto", devices=4, hardware="h100", strategy="megatron", within=1e-9)


def test_a_memory_limit_holds_for_both_plans() -> None:
    free = _planned(strategy=None)
    limited = _planned(strategy=None, memory=free.peak_bytes - 1)
    assert limited.peak_bytes < free.peak_bytes
    with pytest.raises(
        InfeasibleError, match=r"the cache alone takes 16\.38 kB per device, samples over tp, and memory is"
    ):
        _planned(strategy=None, memory=10_000)


@pytest.mark.parametrize(
    ("options", "specified"),
    [
        ({"batch": 0}, "batch=0; give a whole number of at least 1"),
        ({"prompt": 1}, "prompt=1; give a whole number of at least 2"),
        ({"within": 1.0}, 'within=1.0 chooses among meshes; give mesh="auto"'),
        ({"optimizer": "sgd"}, "optimizer='sgd' is given with training=False"),
        ({"colour": 1}, "colour is no option here"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], specified: str) -> None:
    with pytest.raises(InputError, match=specified.replace("(", r"\(")):
        _planned(**options)


def test_a_model_that_does_not_generate_is_refused() -> None:
    with pytest.raises(InputError, match="a Linear is no language model of transformers"):
        autopar.plan_generation(nn.Linear(2, 2), MESH, **by_flag(**LOAD))


def test_flash_decoding_is_of_generation_alone_and_divides_what_divides() -> None:
    with pytest.raises(StrategyError, match=r"found a forward without one\..*It is for generate"):
        autopar.plan(generating("llama"), MESH, {"input_ids": torch.zeros(4, 8).long()}, strategy="flash_decoding")
    with pytest.raises(StrategyError, match="into 2 parts over tp; found a cache of 33"):
        _planned(strategy="flash_decoding", tokens=21)


def test_the_command_plans_generation(capsys: pytest.CaptureFixture[str]) -> None:
    specified = ["plan", "tiny-llama", "--mesh", "2", "--hardware", "h100", "--batch", "4", "--sequence", "16"]
    assert main([*specified, "--layers", "1", "--decode", "16", "--strategy", "megatron"]) == 0
    assert "generation on dp=2: 4 prompts of 16 tokens, 16 new ones each" in capsys.readouterr().out
    assert main([*specified, "--layers", "1", "--inference", "--strategy", "megatron"]) == 0
    assert "plan for the mesh dp=2" in capsys.readouterr().out
    assert main([*specified, "--decode", "16", "--save", "x.json"]) == 2
    assert "--save with --decode, which makes two plans" in capsys.readouterr().err
    assert main([*specified, "--within", "1"]) == 2
    assert "--within is when the first token of --decode has to come" in capsys.readouterr().err
