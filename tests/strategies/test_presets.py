"""Presets: places that they find in a model, annotations that they make there, and errors if they find none."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Link
from autopar.costs.plans.plan import Plan
from autopar.errors import AnnotationError, InputError, StrategyError
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.pipeline.stage_seconds import step_parts
from autopar.planning.settings import context_of
from autopar.strategies.presets import PRESETS, annotations_for
from autopar.strategies.roles import RoledProgram
from tests.support.simulation.simulate import simulate

HIDDEN, CLASSES = 16, 8
ONE, GRID, CUBE = Mesh({"tp": 2}, "cpu"), Mesh({"dp": 2, "tp": 2}, "cpu"), Mesh({"a": 2, "b": 2, "c": 2}, "cpu")


class Named(nn.Module):
    """Embedding, norm, and a pair of products with a residual connection, under names of the caller's choice."""

    def __init__(self, table: str, norm: str, up: str, down: str, head: str) -> None:
        super().__init__()
        self.names = table, norm, up, down, head
        self.add_module(table, nn.Embedding(32, HIDDEN))
        self.add_module(norm, nn.LayerNorm(HIDDEN))
        self.add_module(up, nn.Linear(HIDDEN, 4 * HIDDEN))
        self.add_module(down, nn.Linear(4 * HIDDEN, HIDDEN))
        self.add_module(head, nn.Linear(HIDDEN, CLASSES))

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        table, norm, up, down, head = (getattr(self, name) for name in self.names)
        x_BSH = table(ids_BS)
        x_BSH = x_BSH + down(F.gelu(up(norm(x_BSH))))
        return F.cross_entropy(head(x_BSH).flatten(0, 1), labels_BS.flatten())


class Normed(nn.Module):
    """Products with a norm after each: no pair among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x_BH: Tensor) -> Tensor:
        return self.norm(self.last(self.norm(self.first(x_BH))).sum(-1, keepdim=True) + x_BH).square().mean()


def named(*names: str) -> Named:
    return Named(*(names or ("embed", "norm", "up", "down", "head")))


def ids(batch: int = 4, positions: int = 6) -> tuple[Tensor, Tensor]:
    ids_BS = torch.zeros(batch, positions, dtype=torch.int64)
    return ids_BS, ids_BS.clone()


def specified(strategy: str, mesh: Mesh, model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Annotation, ...]:
    return annotations_for(strategy, capture(model, inputs, {}, training=True), mesh)


@functools.cache
def captured(name: str, batch: int = 4, positions: int = 8) -> Program:
    """A built-in model with one layer."""
    model, inputs = built_in(name, batch, positions, num_layers=1)
    return capture(model, inputs, {}, training=True)


def roles(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Module → roles of its call, for modules with one call that matters."""
    return {row.module: row.roles for row in plan.rows if row.operation in ("linear", "embedding")}


@pytest.mark.parametrize("strategy", ["megatron", "megatron_sequence", "tensor_2d", "zero3", "fsdp_megatron"])
def test_a_preset_says_the_same_whatever_modules_are_called(strategy: str) -> None:
    plain = specified(strategy, GRID, named(), ids())
    renamed = specified(strategy, GRID, named("a", "b", "c", "d", "e"), ids())
    old = {"embed": "a", "norm": "b", "up": "c", "down": "d", "head": "e"}

    def new(pattern: str) -> str:
        return re.sub(r"^%p_(\w+?)_(weight|bias)$", lambda m: f"%p_{old[m[1]]}_{m[2]}", pattern)

    assert [(new(each.pattern), each.axes, each.storage) for each in plain] == [
        (each.pattern, each.axes, each.storage) for each in renamed
    ]


def test_megatron_pairs_the_products_of_a_block_around_its_activation() -> None:
    plan = autopar.plan(named("a", "b", "c", "d", "e"), ONE, ids(), strategy="megatron")
    assert roles(plan) == {"a": ("row",), "c": ("column",), "d": ("row",), "e": ("column",)}


COLUMNS_AND_ROWS: dict[str, dict[str, str]] = {
    "tiny-gpt2": {
        "p_decoder_transformer_h_0_mlp_c_fc_weight": "1",
        "p_decoder_transformer_h_0_mlp_c_fc_bias": "0",
        "p_decoder_transformer_h_0_mlp_c_proj_weight": "0",
        "p_decoder_transformer_h_0_mlp_c_proj_bias": "whole",
        "p_decoder_transformer_h_0_attn_c_attn_weight": "whole",
        "p_decoder_transformer_h_0_attn_c_proj_weight": "0",
        "p_decoder_transformer_wte_weight": "0",
        "p_decoder_transformer_wpe_weight": "whole",
    },
    "tiny-llama": {
        "p_decoder_model_layers_0_self_attn_q_proj_weight": "0",
        "p_decoder_model_layers_0_self_attn_k_proj_weight": "0",
        "p_decoder_model_layers_0_self_attn_v_proj_weight": "0",
        "p_decoder_model_layers_0_self_attn_o_proj_weight": "1",
        "p_decoder_model_layers_0_mlp_gate_proj_weight": "0",
        "p_decoder_model_layers_0_mlp_up_proj_weight": "0",
        "p_decoder_model_layers_0_mlp_down_proj_weight": "1",
        "p_decoder_model_layers_0_input_layernorm_weight": "whole",
        "p_decoder_model_embed_tokens_weight": "0",
        "p_decoder_lm_head_weight": "0",
    },
    "tiny-vit": {
        "p_model_vit_layers_0_attention_q_proj_weight": "0",
        "p_model_vit_layers_0_attention_q_proj_bias": "0",
        "p_model_vit_layers_0_attention_o_proj_weight": "1",
        "p_model_vit_layers_0_attention_o_proj_bias": "whole",
        "p_model_vit_layers_0_mlp_fc1_weight": "0",
        "p_model_vit_layers_0_mlp_fc2_weight": "1",
        "p_model_classifier_weight": "0",
    },
}
"""Parameter → the dim that megatron splits: 0 of a Linear by column, 1 by row; 1 and 0 of a Conv1D (GPT-2)."""


@pytest.mark.parametrize("name", COLUMNS_AND_ROWS)
def test_megatron_finds_the_columns_and_rows_of_a_family(name: str) -> None:
    found = {each.pattern.removeprefix("%"): each.axes for each in annotations_for("megatron", captured(name), ONE)}
    dims = {each: "whole" if found[each][0][1] is None else str(found[each][0][1]) for each in COLUMNS_AND_ROWS[name]}
    assert dims == COLUMNS_AND_ROWS[name]


def test_every_call_and_every_parameter_is_stated_something_about() -> None:
    program = captured("tiny-llama")
    for strategy in ("fully_replicated", "data_parallel", "megatron", "ulysses"):
        patterns = Counter(each.pattern for each in annotations_for(strategy, program, ONE))
        assert set(patterns.values()) == {1}
        assert {f"%{name}" for name in program.parameters.values()} <= patterns.keys()


def test_axes_with_telling_names_are_used_for_what_they_say() -> None:
    plan = autopar.plan(named(), Mesh({"tp": 2, "dp": 2}, "cpu"), ids(), strategy="megatron")
    assert roles(plan)["up"] == ("column", "data")


def test_a_mesh_without_telling_names_gives_its_last_axis_to_the_blocks() -> None:
    plan = autopar.plan(named(), Mesh({"x": 2, "y": 2}, "cpu"), ids(), strategy="megatron")
    assert roles(plan)["up"] == ("data", "column")


def test_zero3_stores_every_parameter_in_parts_and_zero2_keeps_what_it_gathers() -> None:
    for strategy, kept in (("zero3", False), ("zero2", True)):
        plan = autopar.plan(named(), ONE, ids(), strategy=strategy)
        stored = [row for row in plan.rows if row.kind == "parameter"]
        assert all(row.layout.startswith("S(") for row in stored)
        assert any(plan.choices[row.name].endswith(" saved") for row in stored) == kept


def test_zero1_says_what_zero2_says() -> None:
    first, second = (annotations_for(strategy, captured("tiny-mlp"), ONE) for strategy in ("zero1", "zero2"))
    assert {each.strategy for each in first} == {"zero1"}
    assert [replace(each, strategy="zero2") for each in first] == list(second)


def test_a_warning_says_that_zero1_of_one_batch_is_zero2() -> None:
    with pytest.warns(UserWarning, match="zero1: gradients of .* So this is zero2, which moves the same"):
        plan = autopar.plan(named(), ONE, ids(8), strategy="zero1")
    other = autopar.plan(named(), ONE, ids(8), strategy="zero2")
    assert other.memory == plan.memory and other.traffic == plan.traffic


def test_gradients_of_micro_batches_add_up_whole_by_zero1_and_in_parts_by_zero2(tmp_path: Path) -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), (torch.zeros(8, 64),)
    first, second = (autopar.plan(model, ONE, batch, strategy=each, microbatches=4) for each in ("zero1", "zero2"))
    assert first.choices == second.choices and (first.reduce_each, second.reduce_each) == (False, True)
    assert first.memory is not None and second.memory is not None
    stored = first.memory.parts["parameters"]
    # Whole, and a new one is there besides; or in two parts, with those that one backward has reduced, and one layer's.
    assert first.memory.parts["gradients"] > 2 * stored > 0.75 * second.memory.parts["gradients"]
    assert second.peak_bytes < first.peak_bytes
    specified = "reduced by every micro-batch, and added up in parts"
    assert specified in str(second) and specified not in str(first)
    second.to_html(tmp_path / "plan.html")
    assert specified in (tmp_path / "plan.html").read_text()
    parts = [step_parts(plan) for plan in (first, second)]
    assert parts[0].once > parts[1].once and parts[0].backward < parts[1].backward
    assert parts[0].seconds == pytest.approx(parts[1].seconds)
    loaded = Plan.from_json(second.to_json())
    assert loaded.reduce_each and loaded.attach(model, batch, microbatches=4, strategy="zero2").verify().ok


def test_under_a_memory_limit_every_micro_batch_reduces_where_that_fits_and_no_better_plan_does() -> None:
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), (torch.zeros(8, 64),)
    model = autopar.annotate(model, "*", tp="data", storage="tp", regather=False)
    bytes_alone = replace(load("cpu"), links=(Link("wire", None, 0.0, 1e9),))
    whole = autopar.plan(
        model, ONE, batch, hardware=bytes_alone, memory=autopar.Memory(recompute="none"), microbatches=4
    )
    limit = whole.peak_bytes - 1
    plan = autopar.plan(
        model, ONE, batch, hardware=bytes_alone, memory=autopar.Memory(recompute="none", limit=limit), microbatches=4
    )
    assert plan.reduce_each and not whole.reduce_each
    assert plan.peak_bytes <= limit and plan.verify().ok


def test_megatron_warns_where_heads_do_not_divide() -> None:
    mesh = Mesh({"tp": 16}, "cpu")  # 8 heads of queries, 4 of keys and values
    with pytest.warns(UserWarning, match=r"megatron: attention stays whole on tp in 1 calls .* repeated on 16 devices"):
        annotations_for("megatron", captured("tiny-llama"), mesh)


@pytest.mark.parametrize(("size", "factor"), [(4, "h"), (8, "q")])
@pytest.mark.filterwarnings("error")
def test_where_heads_of_keys_do_not_divide_those_of_queries_are_split(size: int, factor: str) -> None:
    specified = {
        each.pattern: each.axes for each in annotations_for("megatron", captured("tiny-llama"), Mesh({"tp": size}))
    }
    assert specified["%scaled_dot_product_attention_default"] == (("tp", f"factor:{factor}"),)
    calls = [call for call in RoledProgram.of(captured("tiny-llama")).learned if call.call.name == "linear"]
    queries, keys, values, out = (specified[f"%{call.name}"] for call in calls[:4])
    kept = (("tp", "factor:o" if factor == "h" else "replicated"),)
    assert (queries, keys, values, out) == ((("tp", "factor:o"),), kept, kept, (("tp", "factor:k"),))


def test_what_the_user_says_goes_before_the_preset() -> None:
    model = autopar.annotate(named(), "up", tp="replicated")
    assert roles(autopar.plan(model, ONE, ids(), strategy="megatron"))["up"] == ("replicated",)
    assert roles(autopar.plan(named(), ONE, ids(), strategy="megatron"))["up"] == ("column",)


def test_what_the_user_says_leaves_the_rest_of_the_preset_standing() -> None:
    model = autopar.annotate(named(), "up", tp="replicated")
    found = roles(autopar.plan(model, ONE, ids(), strategy="megatron"))
    assert found | {"up": ("column",)} == roles(autopar.plan(named(), ONE, ids(), strategy="megatron"))


def test_in_semi_auto_a_preset_fills_in_what_the_user_leaves_open() -> None:
    model = autopar.annotate(named(), "up", tp="column")
    plan = autopar.plan(model, ONE, ids(), mode="semi_auto", strategy="fully_replicated")
    assert roles(plan) == {
        "embed": ("replicated",),
        "up": ("column",),
        "down": ("replicated",),
        "head": ("replicated",),
    }
    with pytest.raises(AnnotationError, match='the model uses matches "nowhere"'):
        autopar.plan(autopar.annotate(named(), "nowhere", tp="column"), ONE, ids(), mode="semi_auto", strategy="zero3")


def test_the_solver_decides_what_a_part_of_a_preset_leaves_open() -> None:
    """The calls as Megatron has them, and whichever storage of their parameters is fastest."""
    free = autopar.plan(named(), ONE, ids())
    specified = annotations_for("megatron", context_of(free).space.program, ONE)
    calls = [each for each in specified if not each.pattern.startswith("%p_")]
    mixed, whole = free.what_if(*calls), autopar.plan(named(), ONE, ids(), strategy="megatron")
    assert roles(mixed) == roles(whole) != roles(free)
    assert free.seconds < mixed.seconds <= whole.seconds


def test_what_if_goes_before_the_preset_of_a_plan() -> None:
    plan = autopar.plan(named(), ONE, ids(), strategy="megatron")
    assert roles(plan.what_if("up", tp="replicated")) == roles(plan) | {"up": ("replicated",)}


def test_a_strategy_next_to_a_plan_is_refused() -> None:
    plan = autopar.plan(named(), ONE, ids())
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(InputError, match="strategy='zero3' with a plan, which has decided everything; give one"):
            autopar.compile(named(), mesh, plan=plan, strategy="zero3")


def test_one_node_can_be_annotated_by_its_name() -> None:
    plan = autopar.plan(autopar.annotate(named(), "%linear_default_1", tp="row"), ONE, ids(), strategy="data_parallel")
    assert roles(plan) | {"down": ("data",)} == roles(autopar.plan(named(), ONE, ids(), strategy="data_parallel"))
    assert roles(plan)["down"] == ("row",)


def test_one_parameter_can_be_annotated_by_its_node() -> None:
    plan = autopar.plan(autopar.annotate(named(), "%p_up_weight", tp=1), ONE, ids(), strategy="data_parallel")
    layouts = {row.name: row.layout for row in plan.rows if row.kind == "parameter"}
    assert (layouts["p_up_weight"], layouts["p_down_weight"]) == ("S(1)", "I")


def test_a_factor_of_a_nodes_rule_can_be_named() -> None:
    for factor, role in (("o", "column"), ("k", "row")):
        model = autopar.annotate(named(), "%linear_default", tp=f"factor:{factor}")
        assert roles(autopar.plan(model, ONE, ids(), strategy="fully_replicated"))["up"] == (role,)


def test_a_factor_of_the_operations_of_a_name_can_be_named() -> None:
    model = autopar.annotate(named(), "linear", tp="factor:k")
    found = roles(autopar.plan(model, ONE, ids(), strategy="fully_replicated"))
    assert {found[name] for name in ("up", "down", "head")} == {("row",)}


BAD_NODES: list[tuple[str, Any, str]] = [
    ("up", "factor:o", r'"up" is a module; name operations in it, as in "up.linear", or one node'),
    ("%linear_default", "factor:k+o", r'which offers "factor:\.\.\.0", .*"factor:o" on axis tp'),
    ("%linear_default", "factor:z", r'the rule of linear_default is ".*", which offers "?factor:.* on axis tp'),
    ("up.weight", "factor:o", r"up.weight is a parameter, and only operations have factors; .* as in tp=0"),
    ("%p_up_weight", "factor:o", r"%p_up_weight is a parameter, and only operations have factors; .* as in tp=0"),
    ("%linear_defualt", "column", r'no call and no parameter "%linear_defualt". Near it are %linear_default'),
]


@pytest.mark.parametrize(("pattern", "what", "message"), BAD_NODES, ids=lambda value: str(value)[:18])
def test_what_is_no_node_or_no_factor_is_refused(pattern: str, what: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=f"(?s){message}"):
        autopar.plan(autopar.annotate(named(), pattern, tp=what), ONE, ids(), mode="semi_auto")


def test_a_name_that_is_not_known_is_answered_with_the_nearest() -> None:
    with pytest.raises(StrategyError, match=r"'megatorn' is not known; .* fully_replicated, .*Did you mean .megatron"):
        annotations_for("megatorn", captured("tiny-mlp"), ONE)
    with pytest.raises(StrategyError, match=r"ep \(expert_data\)\.$"):
        annotations_for("qqq", captured("tiny-mlp"), ONE)


Make = Callable[[], Program]
NO_PLACE: list[tuple[str, Mesh, Make, str]] = [
    ("hsdp", ONE, lambda: captured("tiny-mlp"), "hsdp needs 2 mesh axes, one to replicate over .* the mesh is tp=2"),
    ("fsdp_megatron", ONE, lambda: captured("tiny-mlp"), "fsdp_megatron needs 2 mesh axes, .* Split an axis in two"),
    ("tensor_2d", ONE, lambda: captured("tiny-mlp"), "tensor_2d needs 2 mesh axes, the rows and the columns"),
    ("tensor_2d", CUBE, lambda: captured("tiny-mlp"), "tensor_2d needs exactly 2 mesh axes, .* Join axes"),
    ("tensor_2_5d", GRID, lambda: captured("tiny-mlp"), "tensor_2_5d needs 3 mesh axes, the depth"),
    ("tensor_3d", GRID, lambda: captured("tiny-mlp"), "tensor_3d needs 3 mesh axes, the edges of the cube"),
    (
        "zero3",
        Mesh({"dp": 3}, "cpu"),
        lambda: captured("tiny-mlp"),
        "the batch into 3 parts over dp; found a batch of 4",
    ),
    (
        "megatron",
        Mesh({"dp": 3, "tp": 2}, "cpu"),
        lambda: captured("tiny-mlp"),
        "into 3 parts over dp; .* that 3 divides",
    ),
    (
        "ulysses",
        ONE,
        lambda: captured("tiny-vit"),
        r"ulysses splits .* the inputs are float32\[4, 3, 32, 32\], int64\[4\]\. Positions that the model makes itself",
    ),
    (
        "megatron_sequence",
        ONE,
        lambda: captured("tiny-mlp"),
        r"the inputs are float32\[.*\]\. Positions that the model makes itself",
    ),
    (
        "ulysses",
        Mesh({"sp": 16}, "cpu"),
        lambda: capture(*built_in("tiny-llama", 4, 16), {}, training=True),
        "into 16 parts over sp; .* has 8 of queries and 4 of keys and values. Use an axis whose size divides them",
    ),
    (
        "gather_kv",
        Mesh({"sp": 3}, "cpu"),
        lambda: captured("tiny-llama"),
        r"into 3 parts over sp; found 8 positions, if dim 1 of the input int64\[4, 8\] is that of positions, and "
        r"needed is a multiple of 3, and of 6 for causal attention to zigzag-shard them. Pad the sequences to 12",
    ),
    (
        "ulysses",
        Mesh({"sp": 3}, "cpu"),
        lambda: captured("tiny-llama"),
        "needed is a multiple of 3. Pad the sequences to 9, with labels that the loss ignores",  # heads are divided
    ),
    (
        "usp",
        Mesh({"cp": 2, "sp": 4}, "cpu"),
        lambda: captured("tiny-llama"),
        "usp splits positions over cp, sp, and causal attention zigzag-shards them, two chunks on each of 8 devices; "
        "found 8 positions, and needed is a multiple of 16. Pad the sequences to 16, with labels that the loss ignores",
    ),
    (
        "ulysses",
        ONE,
        lambda: capture(named(), ids(), {}, training=True),
        "ulysses: no attention in this model. Use megatron_sequence",
    ),
    (
        "megatron",
        ONE,
        lambda: capture(Normed(), (torch.zeros(4, HIDDEN),), {}, training=True),
        "pairs of matrix products .* found none that divide into 2 parts over tp .linear_default: .* whole",
    ),
]


@pytest.mark.parametrize(("strategy", "mesh", "make", "message"), NO_PLACE)
def test_a_preset_without_a_place_says_what_it_found_and_what_to_do(
    strategy: str, mesh: Mesh, make: Make, message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        annotations_for(strategy, make(), mesh)


def test_every_preset_has_a_docstring_with_its_source() -> None:
    without = {"fully_replicated"}
    for name, preset in PRESETS.items():
        assert name in without or re.search(r"(Source:|\().*(19|20)\d\d", preset.__doc__ or "", re.DOTALL), name
