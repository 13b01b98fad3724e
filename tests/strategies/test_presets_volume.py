"""Bytes that a step of a preset moves: formulas are read from its docstring, and compared with the plan.

tests/strategies/test_presets_parity.py checks that ranks move the bytes of the plan. The presets for experts have their
own tests, tests/strategies/test_presets_experts.py.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction

import pytest
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import BUILT_IN, BuiltIn, built_in
from autopar.strategies.presets import PRESETS
from tests.support.families import FAMILIES

BATCH, POSITIONS, LAYERS = 8, 32, 2
BYTES_ALONE = Hardware(
    "links without latency",
    {"float32": 1e15},
    1e15,
    10**9,
    0.0,
    (Link("wire", None, 0.0, 1e7),),
    communication_share=0.25,
)
"""Here the way from one layout to another is that of the fewest bytes; latency would have short ways of more bytes."""
FLOAT_BYTES = 4
LINE = re.compile(r"^ +(\w+)/(\w+) = (.+)$", re.MULTILINE)

LETTERS: Mapping[str, str] = {
    "fully_replicated": "nm",
    "data_parallel": "nm",
    "zero2": "nm",
    "zero3": "nm",
    "hsdp": "rs",
    "megatron": "dt",
    "megatron_sequence": "dt",
    "async_tensor_parallel": "dt",
    "megatron_regather": "dt",
    "fsdp_megatron": "dt",
    "ulysses": "dc",
    "gather_kv": "dc",
    "ring": "dc",
    "ring_self_attention": "dc",
    "usp": "dcu",
    "tensor_2d": "rc",
    "tensor_2_5d": "zrc",
    "tensor_3d": "sio",
    "expert_data": "de",
    "expert_model": "et",
    "expert_data_model": "det",
    "expert_folded": "dt",
}
"""The letters of a mesh's axes, outer first. A mesh of one axis has the first of "nm", else the last."""
UNREAD = ("bias", "position_embeddings", "cls_token", "layers.0.0.weight")
"""Ends of the names of parameters whose values the backward has no use for, norms apart."""
CASES = [
    ("fully_replicated", (2,)),
    ("data_parallel", (2, 2)),
    ("zero2", (2, 2)),
    ("zero3", (2,)),
    ("zero3", (2, 2)),
    ("hsdp", (4, 2)),
    ("megatron", (2,)),
    ("megatron", (4, 2)),
    ("megatron_sequence", (4,)),
    ("megatron_sequence", (4, 2)),
    ("async_tensor_parallel", (4,)),
    ("async_tensor_parallel", (4, 2)),
    ("megatron_regather", (4,)),
    ("megatron_regather", (4, 2)),
    ("fsdp_megatron", (4, 2)),
    ("ulysses", (4,)),
    ("ulysses", (2, 2)),
    ("gather_kv", (2, 2)),
    ("ring", (4,)),
    ("ring", (2, 2)),
    ("ring_self_attention", (4,)),
    ("ring_self_attention", (2, 2)),
    ("usp", (2, 2, 2)),
    ("tensor_2d", (4, 2)),
    ("tensor_2_5d", (4, 2, 2)),
    ("tensor_3d", (2, 2, 2)),
]


@functools.cache
def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return built_in("tiny-llama", BATCH, POSITIONS)


def axes_of(strategy: str, shape: tuple[int, ...]) -> dict[str, int]:
    """Letter → size of the axes that a mesh has."""
    letters = LETTERS[strategy]
    if len(shape) < len(letters):
        letters = letters[: len(shape)] if letters == "nm" else letters[-len(shape) :]
    return dict(zip(letters, shape, strict=True))


def formulas(strategy: str, symbols: Mapping[str, int], axes: Mapping[str, int]) -> dict[tuple[str, str], Fraction]:
    """The formulas of a docstring with values for the symbols, over the axes that there are."""
    values = dict.fromkeys(LETTERS[strategy], 1) | dict(symbols) | dict(axes)
    exact = {name: Fraction(value) for name, value in values.items()}
    found: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for collective, letters, text in LINE.findall(PRESETS[strategy].__doc__ or ""):
        there = "_".join(letter for letter in letters.split("_") if letter in axes)
        if there:
            found[collective, there] += eval(text.replace("·", "*"), {"__builtins__": {}}, exact)
    return found


def moved(plan: Plan) -> dict[tuple[str, str], int]:
    return {key: count for key, count in plan.traffic.items() if count}


@functools.cache
def plan_of_llama(strategy: str, shape: tuple[int, ...]) -> Plan:
    """The plan under a preset, on a mesh whose axes are the formulas' letters."""
    model, inputs = llama()
    return planned(model, axes_of(strategy, shape), inputs, strategy)


def planned(
    model: nn.Module, axes: Mapping[str, int], inputs: tuple[Tensor, ...] | dict[str, Tensor], strategy: str
) -> Plan:
    return autopar.plan(model, Mesh(dict(axes), "cpu"), inputs, strategy=strategy, hardware=BYTES_ALONE)


def num_bytes(model: nn.Module, *words: str) -> int:
    """Bytes of the parameters in whose name one of the words is; of all without words."""
    return FLOAT_BYTES * sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not words or any(word in name for word in words)
    )


@functools.cache
def symbols_of_llama() -> dict[str, int]:
    """The symbols that the presets' module explains, for the built-in tiny Llama."""
    model, _ = llama()
    built = BUILT_IN["tiny-llama"]
    assert isinstance(built, BuiltIn)
    sizes = built.sizes
    tokens = FLOAT_BYTES * BATCH * POSITIONS
    hidden = tokens * sizes["hidden_size"]
    table, norms = num_bytes(model, "embed_tokens"), num_bytes(model, "norm")
    return {
        "P": num_bytes(model),
        "W": num_bytes(model) - table - norms,
        "N": norms,
        "T": table,
        "U": table,
        "A": hidden,
        "K": hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"],
        "F": tokens * sizes["intermediate_size"],
        "V": tokens * sizes["vocab_size"],
        "R": tokens,
        "L": LAYERS,
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(("strategy", "shape"), CASES, ids=lambda value: str(value).replace(", ", "x"))
def test_a_step_of_llama_moves_what_the_docstring_says(strategy: str, shape: tuple[int, ...]) -> None:
    axes = axes_of(strategy, shape)
    assert moved(plan_of_llama(strategy, shape)) == formulas(strategy, symbols_of_llama(), axes)


def test_where_heads_of_keys_do_not_divide_keys_are_whole() -> None:
    symbols = symbols_of_llama()
    layers, keys = symbols["L"], 2 * symbols["L"] * symbols["K"]
    ulysses = formulas("ulysses", symbols, {"c": 8})
    ulysses["all_to_all", "c"] = Fraction(4 * layers * symbols["A"], 8)
    for collective in ("all_gather", "reduce_scatter"):
        ulysses[collective, "c"] += keys
    assert moved(plan_of_llama("ulysses", (8,))) == ulysses
    megatron = formulas("megatron", symbols, {"t": 8})
    megatron["all_reduce", "t"] += keys
    assert moved(plan_of_llama("megatron", (8,))) == megatron


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("data_parallel", (4,)), ("data_parallel", (2, 2)), ("zero2", (2, 2)), ("zero3", (2, 2)), ("hsdp", (2, 2))],
)
@pytest.mark.parametrize("name", ["tiny-mlp", "tiny-vit"])
def test_what_depends_on_parameters_alone_holds_for_other_models(
    name: str, strategy: str, shape: tuple[int, ...]
) -> None:
    model, inputs = built_in(name, BATCH, POSITIONS)
    read = {n: p for n, p in model.named_parameters() if "layernorm" in n or not n.endswith(UNREAD)}
    unread = num_bytes(model) - FLOAT_BYTES * sum(parameter.numel() for parameter in read.values())
    axes = axes_of(strategy, shape)
    expected = formulas(strategy, {"P": num_bytes(model), "U": unread}, axes)
    assert moved(planned(model, axes, inputs, strategy)) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_what_is_made_of_a_parameter_alone_is_summed_as_the_parameter(shape: tuple[int, ...]) -> None:
    t5 = FAMILIES["t5"]  # a table of 32 rows, from which the bias of every pair of positions is looked up
    model, axes = t5.build(), axes_of("data_parallel", shape)
    plan = planned(model, axes, t5.inputs(0)[1], "data_parallel")
    assert moved(plan) == formulas("data_parallel", {"P": num_bytes(model)}, axes)


def test_every_preset_has_formulas_except_those_that_say_so() -> None:
    with_formulas = {name for name, preset in PRESETS.items() if LINE.search(preset.__doc__ or "")}
    assert set(PRESETS) - with_formulas == {"fully_replicated", "zero1", "context_parallel", "flash_decoding"}
    assert {name for name in with_formulas if not name.startswith("expert_")} < {strategy for strategy, _ in CASES}
