"""The parity ladder: every family trains on real ranks, split in every way, as it trains on one process.

A mode says how a family is split: "auto" leaves it to the planner, on hardware where splitting pays; the others force
roles on every operation that has them. The whole matrix is marked slow; the fast selection touches every family and
every mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.support.families import FAMILIES
from tests.support.parity import SLOW_DEVICES, Case, Training, check, check_rounding
from tests.support.ranks import Ranks

Annotations = tuple[tuple[str, dict[str, Any]], ...]

WORLDS = ((2,), (4,), (2, 2))
CONVOLUTIONAL = ("resnet", "unet")
WITHOUT_SEQUENCE = (*CONVOLUTIONAL, "mlp", "vit")  # vit has 17 positions

DATA: Annotations = (("*", {"dp": "data"}),)

PROJECTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gpt2": (("*.c_attn", "*.c_fc"), ("*.c_proj",)),
    "llama": (("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), ("*.o_proj", "*.down_proj")),
    "bert": (("*.query", "*.key", "*.value", "*.intermediate.dense"), ("*.layer.*.output.dense",)),
    "t5": (("*.q", "*.k", "*.v", "*.wi"), ("*.o", "*.wo")),
    "bart": (("*.q_proj", "*.k_proj", "*.v_proj", "*.fc1"), ("*.out_proj", "*.fc2")),
    "vit": (("*.q_proj", "*.k_proj", "*.v_proj", "*.fc1"), ("*.o_proj", "*.fc2")),
    "transformer_encoder": (("*.in_proj_weight", "*.linear1"), ("*.out_proj", "*.linear2")),
    "mlp": (("up",), ("down",)),
    "lora": (
        tuple(f"*.{name}_proj.base_layer" for name in ("q", "k", "v", "gate", "up")),
        ("*.o_proj.base_layer", "*.down_proj.base_layer"),
    ),
}
"""Family → modules split by column and modules split by row, as in Megatron-LM."""
PROJECTIONS |= {"qwen3": PROJECTIONS["llama"], "mistral": PROJECTIONS["llama"], "roberta": PROJECTIONS["bert"]}


def modes(family: str, num_axes: int) -> Mapping[str, Annotations]:
    """Name of a mode → what it says of a family on a mesh of one axis (dp) or two (dp and tp)."""
    op = "conv2d" if family in CONVOLUTIONAL else "linear"
    sequence = family not in WITHOUT_SEQUENCE
    if num_axes == 1:
        found: dict[str, Annotations] = {
            "auto": (),
            "data": DATA,
            "column": ((op, {"dp": "column"}),),
            "row": ((op, {"dp": "row"}),),
            "storage": (("*", {"storage": "dp"}),),
        }
        found |= {"sequence": (("*", {"dp": "sequence"}),)} if sequence else {}
        return found | ({"vocabulary": vocabulary("dp")} if family == "gpt2" else {})
    # GPT-2's vocabulary may be padded over one axis, not over two.
    found = {
        "auto": (),
        "data": (("*", {"dp": "data", "tp": "data"}),),
        "data+column": (*DATA, (op, {"tp": "column"})),
        "data+row": (*DATA, (op, {"tp": "row"})),
        "column+row": ((op, {"dp": "column", "tp": "row"}),),
        "column+column": ((op if family != "gpt2" else "transformer.*", {"dp": "column", "tp": "column"}),),
        "storage": (("*", {"storage": ("dp", "tp")}),),
        "storage+column": (("*", {"storage": "dp"}), (op, {"tp": "column"})),
    }
    if sequence:
        found |= {"data+sequence": (("*", {"dp": "data", "tp": "sequence"}),)}
    if family in PROJECTIONS:
        column, row = PROJECTIONS[family]
        split = (*((name, {"tp": "column"}) for name in column), *((name, {"tp": "row"}) for name in row))
        found |= {"megatron": (*DATA, *split)}
    return found | ({"data+vocabulary": (*DATA, *vocabulary("tp"))} if family == "gpt2" else {})


def vocabulary(axis: str) -> Annotations:
    """GPT-2's 257 tokens split over an axis, from the embedding to the loss; they divide by neither 2 nor 4."""
    return ("lm_head", {axis: "column"}), ("*.wte", {axis: "row"}), ("cross_entropy_loss", {axis: "column"})


FAST: dict[str, tuple[tuple[tuple[int, ...], str], ...]] = {
    "gpt2": (((2,), "vocabulary"), ((4,), "vocabulary"), ((2, 2), "data+vocabulary"), ((2, 2), "data+column")),
    "llama": (((2, 2), "megatron"), ((4,), "sequence")),
    "qwen3": (((4,), "column"),),
    "mistral": (((4,), "auto"),),
    "bert": (((2, 2), "auto"), ((4,), "row")),
    "roberta": (((2,), "data"),),
    "t5": (((2,), "sequence"),),
    "bart": (((4,), "storage"),),
    "vit": (((4,), "data"),),
    "transformer_encoder": (((2, 2), "data+sequence"), ((2,), "column")),
    "resnet": (((2,), "storage"),),
    "unet": (((2, 2), "column+row"), ((2,), "row")),
    "mlp": (((2, 2), "data+row"), ((2, 2), "column+column"), ((2, 2), "storage+column"), ((2, 2), "data")),
    "lora": (((2, 2), "storage"),),
}


def case(family: str, world: tuple[int, ...], mode: str, **options: Any) -> Case:
    """One case of the matrix; annotations that match nothing are errors."""
    annotations = modes(family, len(world))[mode]
    return Case(family, world, annotations, {"hardware": SLOW_DEVICES, "mode": "semi_auto"}, **options)


def matrix() -> Iterator[Any]:
    """Every family on every mesh in every mode."""
    for family in FAMILIES:
        for world in WORLDS:
            for mode in modes(family, len(world)):
                shape = "x".join(map(str, world))
                yield pytest.param(family, world, mode, id=f"{family}-{shape}-{mode}")


def fast() -> Iterator[Any]:
    """The fast selection, family by family: what is captured for a family's first case serves the others."""
    for family, chosen in FAST.items():
        for world, mode in chosen:
            yield pytest.param(family, world, mode, id=f"{family}-{'x'.join(map(str, world))}-{mode}")


def hold(found: list[Training], case: Case) -> None:
    """Check that the plan is split as the case says, so that no case passes because nothing was split."""
    roles = found[0].roles
    if not case.annotations:
        assert any(role.startswith("S(") for kind, _, role in roles if kind == "parameter") or any(
            role not in ("replicated", "partial") for kind, _, role in roles if kind == "call"
        )
    for _, specified in case.annotations:
        for axis, role in specified.items():
            if axis != "storage":
                assert ("call", axis, role) in roles
                continue
            for each in (role,) if isinstance(role, str) else role:
                assert any(kind == "parameter" and on == each and at.startswith("S(") for kind, on, at in roles)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("family", "world", "mode"), fast())
def test_every_family_and_every_mode_train_on_ranks_as_on_one_process(
    ranks: Ranks, family: str, world: tuple[int, ...], mode: str
) -> None:
    each = case(family, world, mode, steps=2)
    hold(check(ranks, each), each)


def test_the_fast_selection_holds_every_family_and_every_mode() -> None:
    assert FAST.keys() == FAMILIES.keys()
    everything = {mode for family in FAMILIES for world in WORLDS for mode in modes(family, len(world))}
    assert {mode for chosen in FAST.values() for _, mode in chosen} == everything


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world", "mode"), matrix())
def test_a_family_trains_on_ranks_as_on_one_process(
    ranks: Ranks, family: str, world: tuple[int, ...], mode: str
) -> None:
    each = case(family, world, mode)
    hold(check(ranks, each), each)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "data+column", "data+row", "storage"])
@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "vit", "t5"])
def test_a_family_in_bfloat16_rounds_no_worse_on_ranks_than_on_one_process(
    ranks: Ranks, family: str, mode: str
) -> None:
    each = case(family, (2, 2), mode, dtype=torch.bfloat16, steps=3)
    hold(check_rounding(ranks, each), each)
