"""The pictures of docs/reference/strategies.md are drawn from the plans, and its bytes are theirs."""

from __future__ import annotations

import itertools
import math
import string
from pathlib import Path

import pytest

from autopar.costs.plans.plan import Plan
from autopar.strategies.presets import PRESETS
from tests.strategies.test_presets_volume import plan_of_llama

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "strategies.md"
SHAPES: dict[str, tuple[int, ...]] = {
    "data_parallel": (2,),
    "zero2": (2,),
    "zero3": (2,),
    "hsdp": (2, 2),
    "megatron": (2,),
    "megatron_sequence": (2,),
    "async_tensor_parallel": (2,),
    "megatron_regather": (2,),
    "ulysses": (2,),
    "gather_kv": (2,),
    "ring": (2,),
    "ring_self_attention": (2,),
    "usp": (2, 2),
    "fsdp_megatron": (2, 2),
    "tensor_2d": (2, 2),
    "tensor_2_5d": (2, 2, 2),
    "tensor_3d": (2, 2, 2),
}
"""Preset → the mesh of its picture."""
DRAWN = (
    ("up_proj [out, in]", "parameter", "layers.0.mlp.up_proj.weight", "", 2),
    ("down_proj [out, in]", "parameter", "layers.0.mlp.down_proj.weight", "", 2),
    ("between blocks [b, s, h]", "call", "layers.0", "add", 3),
    ("in the MLP [b, s, f]", "call", "layers.0.mlp.act_fn", "silu", 3),
    ("in attention [b, heads, s, d]", "call", "layers.0.self_attn", "scaled_dot_product_attention", 4),
)
"""Heading, kind of decision, end of the module's path, operation, number of dims."""


def held(layout: str, sizes: tuple[int, ...], place: tuple[int, ...], ndim: int) -> str:
    """Return the part of each dim that a device has: a letter, two if zigzag-sharded, or "*" for all of it."""
    found = []
    for dim in range(ndim):
        axes = [
            (placement[0], size, position)
            for placement, size, position in zip(layout.split(), sizes, place, strict=True)
            if placement in (f"S({dim})", f"Z({dim})")
        ]
        zigzag_axes_of = any(kind == "Z" for kind, *_ in axes)
        held = string.ascii_lowercase[: math.prod(size for _, size, _ in axes) * (2 if zigzag_axes_of else 1)]
        for kind, size, position in axes:
            if kind == "Z":
                part = len(held) // (2 * size)
                last = len(held) - (position + 1) * part
                held = held[position * part :][:part] + held[last:][:part]
            else:
                part = len(held) // size
                held = held[position * part :][:part]
        found.append(held if axes else "*")
    return f"`{' '.join(found)}`"


def picture(plan: Plan) -> str:
    """A row per device with what it holds of each tensor that is drawn."""
    sizes = tuple(plan.mesh.axes.values())
    lines = [f"| {' '.join(plan.mesh.names)} | {' | '.join(name for name, *_ in DRAWN)} |", "|---" * 6 + "|"]
    layouts = [
        [
            r.layout
            for r in plan.rows
            if r.kind == kind and r.module.endswith(path) and r.operation == (operation or kind)
        ]
        for _, kind, path, operation, _ in DRAWN
    ]
    for place in itertools.product(*map(range, sizes)):
        cells = [held(each[-1], sizes, place, ndim) for each, (*_, ndim) in zip(layouts, DRAWN, strict=True)]
        lines.append(f"| {' '.join(map(str, place))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def section(strategy: str) -> str:
    return DOCS.read_text().partition(f"\n## {strategy}\n")[2].partition("\n## ")[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("strategy", "shape"), SHAPES.items(), ids=SHAPES)
def test_a_picture_is_that_of_the_plan(strategy: str, shape: tuple[int, ...]) -> None:
    assert picture(plan_of_llama(strategy, shape)) in section(strategy)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "shape"), SHAPES.items(), ids=SHAPES)
def test_the_table_holds_the_bytes_and_the_memory_of_the_plan(strategy: str, shape: tuple[int, ...]) -> None:
    plan = plan_of_llama(strategy, shape)
    moved, memory = sum(plan.traffic.values()), plan.peak_bytes
    mesh = " × ".join(map(str, shape))
    assert f"| `{strategy}` | {mesh} | {moved / 1e6:.2f} MB | {memory / 1e6:.1f} MB |" in DOCS.read_text()


def test_every_preset_has_a_section() -> None:
    assert all(section(strategy) for strategy in PRESETS)
