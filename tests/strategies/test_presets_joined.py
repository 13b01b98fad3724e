"""Strategies of several presets train as one process does, take the axes that their parts name, and refuse others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.export import capture
from autopar.errors import InputError, StrategyError
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets import annotations_for, preset_named
from tests.support.expert_models import decoder, token_batches
from tests.support.families import FAMILIES
from tests.support.pipeline_training import PipelineCase, check
from tests.support.ranks import Ranks
from tests.support.simulation.training import Steps, train_alike

TP_CP = {"cp": 2, "tp": 2}
DP_CP_TP = {"dp": 2, "cp": 2, "tp": 2}
DENSE = [
    *((f"{tensor}+{positions}", TP_CP) for tensor in ("tp", "sp") for positions in ("ring", "gather_kv", "ulysses")),
    ("async_tensor_parallel+cp", TP_CP),
    ("megatron_regather+cp", TP_CP),
    ("fsdp+tp+cp", DP_CP_TP),
    ("fsdp+sp+ring", DP_CP_TP),
    ("fsdp+sp", {"dp": 2, "tp": 2}),
    ("hsdp+tp", {"dp": 2, "fsdp": 2, "tp": 2}),
    ("zero2+cp", {"dp": 2, "cp": 2}),
]
OF_EXPERTS = [
    ("fsdp+ep", {"dp": 2, "ep": 2}),
    ("sp+ep", {"ep": 2, "tp": 2}),
    ("fsdp+tp+ep", {"dp": 2, "ep": 2, "tp": 2}),
    ("cp+ep", {"cp": 2, "ep": 2}),
    ("ring+ep", {"cp": 2, "ep": 2}),
    ("sp+expert_folded", {"dp": 2, "tp": 2}),
    ("fsdp+sp+cp+ep", {"cp": 2, "ep": 2, "tp": 2}),
    ("fsdp+cp+expert_folded", {"cp": 2, "tp": 2}),
]


def lm(step: int) -> dict[str, Any]:
    return FAMILIES["llama"].inputs(step)[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "mesh"), DENSE, ids=lambda value: value if isinstance(value, str) else "")
def test_joined_presets_train_on_ranks_as_on_one_process(strategy: str, mesh: Mapping[str, int]) -> None:
    steps = Steps([lm(step) for step in range(2)], optimizer="adamw")
    model = FAMILIES["gpt2" if "ulysses" in strategy else "llama"].build()
    train_alike(model, steps, mesh, {"strategy": strategy})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "mesh"), OF_EXPERTS, ids=lambda value: value if isinstance(value, str) else "")
def test_experts_joined_with_other_presets_train_as_on_one_process(strategy: str, mesh: Mapping[str, int]) -> None:
    steps = Steps(token_batches(2, batch=8, positions=8))
    train_alike(decoder("sorted"), steps, mesh, {"strategy": strategy})


def specified(strategy: str, mesh: Mapping[str, int], batch: int = 4, positions: int = 16) -> Any:
    model, ids = FAMILIES["llama"].build(), torch.zeros(batch, positions, dtype=torch.int64)
    batch_of = {"input_ids": ids, "labels": ids}
    return autopar.plan(model, Mesh(dict(mesh), "cpu"), batch_of, strategy=strategy)


def test_each_part_has_the_axis_that_its_name_tells_of() -> None:
    plan = specified("fsdp+sp+ring", DP_CP_TP)
    by_module = {row.module.removeprefix("model.layers.0."): row for row in plan.rows if row.kind == "call"}
    assert by_module["mlp.up_proj"].roles == ("data", "sequence", "column")
    assert by_module["mlp.down_proj"].roles == ("data", "sequence", "row")
    assert by_module["post_attention_layernorm"].roles == ("data", "sequence", "sequence")
    attention = next(row for row in plan.rows if row.operation == "scaled_dot_product_attention")
    assert plan.choices[attention.name] == "a0 s+t h"
    stored = {row.name: row.layout for row in plan.rows if row.kind == "parameter"}
    down = next(layout for name, layout in stored.items() if "layers_0_mlp_down_proj" in name)
    assert all(placement.startswith("S(") for placement in down.split()) and down.endswith("S(1)")


@pytest.mark.parametrize("strategy", ["megatron", "sp", "fsdp_megatron"])
def test_columns_leave_an_axis_of_context_parallelism_to_positions(strategy: str) -> None:
    program = capture(FAMILIES["llama"].build(), (), lm(0), training=True)
    alone, joined = (
        annotations_for(each, program, Mesh(DP_CP_TP, "cpu")) for each in (strategy, f"{strategy}+context_parallel")
    )
    assert [replace(each, strategy="") for each in alone] == [replace(each, strategy="") for each in joined]
    unnamed = annotations_for(strategy, program, Mesh({"dp": 2, "cp": 2}, "cpu"))
    (up,) = (each for each in unnamed if each.pattern == "%linear_default_5")
    assert dict(up.axes)["cp"] == "factor:o", "no axis is called as one of columns"


def test_experts_are_stored_in_parts_over_the_axes_that_do_not_divide_them() -> None:
    program = capture(decoder("sorted"), (), token_batches(1, batch=4)[0], training=True)
    found = annotations_for("fsdp+ep", program, Mesh({"dp": 2, "ep": 2}, "cpu"))
    pinned = {each.pattern: each.axes for each in found if each.pattern.startswith("%p_")}
    assert pinned == {f"%p_layers_{layer}_moe_w{n}": (("ep", 0),) for layer in range(1) for n in (1, 3, 2)}
    assert (found[-1].pattern, found[-1].storage, found[-1].regather) == ("*", ("dp", "ep"), True)


def test_axes_without_telling_names_go_from_the_last_to_columns_experts_and_positions() -> None:
    program = capture(FAMILIES["llama"].build(), (), lm(0), training=True)
    by_name, by_place = (
        annotations_for("tp+ring", program, Mesh(dict.fromkeys(names, 2), "cpu"))
        for names in (("dp", "cp", "tp"), ("x", "y", "z"))
    )
    letters = dict(zip("xyz", ("dp", "cp", "tp"), strict=True))
    assert [(each.pattern, [what for _, what in each.axes]) for each in by_name] == [
        (each.pattern, [what for _, what in each.axes]) for each in by_place
    ]
    assert all(
        [letters[axis] for axis, _ in place.axes] == [axis for axis, _ in name.axes]
        for name, place in zip(by_name, by_place, strict=True)
    )


def test_names_in_short_are_written_out_and_named_once() -> None:
    assert preset_named("fsdp + tp+cp") == "zero3+megatron+context_parallel"
    assert preset_named("tp+megatron") == "megatron"


@pytest.mark.parametrize(
    ("strategy", "mesh", "message"),
    [
        ("tp+cp", {"tp": 4}, r"needs 2 mesh axes, one for positions and one for columns and rows; the mesh is tp=4"),
        ("fsdp+tp", {"tp": 4}, "needs 2 mesh axes, one to store parameters over and one for columns and rows"),
        (
            "tp+cp",
            {"dp": 2, "tp": 2},
            "megatron.context_parallel needs a mesh axis for positions, called sp or cp or .* the mesh is dp=2 × tp=2. "
            "Rename one of its axes",
        ),
        ("fsdp+zero2", {"dp": 4}, "zero3.zero2: two of its parts say how parameters are stored. Leave one of them out"),
        ("sp+megatron_regather", {"tp": 2}, "two of its parts say what the axis of columns and rows splits"),
        ("tp+ulysses", {"cp": 2, "tp": 2}, "into 4 parts over cp; .* 4 of queries and 2 of keys and values"),
        ("tp+tensor_2d", {"cp": 2, "tp": 2}, "tensor_2d is joined with no other preset. Join some of data_parallel, "),
        ("tp+pp", {"pp": 2, "tp": 2}, "a pipeline is an axis of the mesh.* leave pp out of the strategy"),
        ("cp+megatorn", {"cp": 2, "tp": 2}, "'megatorn' is not known; .* Did you mean"),
    ],
)
def test_a_strategy_that_cannot_be_joined_says_what_it_found_and_what_it_needs(
    strategy: str, mesh: Mapping[str, int], message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        annotations_for(strategy, capture(FAMILIES["llama"].build(), (), lm(0), training=True), Mesh(dict(mesh), "cpu"))


def test_a_part_of_a_strategy_does_what_it_does_alone() -> None:
    with pytest.warns(UserWarning, match=r"zero1\+megatron: gradients of .* So this is zero2"):
        specified("zero1+tp", {"dp": 2, "tp": 2})
    model, ids = FAMILIES["llama"].build(), torch.zeros(4, 16, dtype=torch.int64)
    with pytest.raises(InputError, match=r"zero2\+megatron.* is given with training=False"):
        autopar.plan(model, Mesh({"tp": 2}, "cpu"), {"input_ids": ids}, strategy="zero2+tp", training=False)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "strategy"), [("qwen3_moe", "ep"), ("llama", "zero2+ddp")])
def test_stages_of_a_pipeline_are_planned_by_joined_presets(ranks: Ranks, family: str, strategy: str) -> None:
    check(ranks, PipelineCase(family, "pp2xdp2", "1f1b", options={"strategy": strategy}, steps=2))
