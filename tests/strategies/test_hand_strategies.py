"""The planner against plans written by hand: none, written as annotations, is predicted to be faster."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from autopar.capture.export import capture, skeleton
from autopar.costs.hardware.load import load
from autopar.costs.space.build import build_space
from autopar.costs.space.space import Space
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.annotations.annotate import annotate, annotations_of, pins_of
from autopar.planning.planner import make_plan
from benchmarks.unet import unet
from tests.runtime.module.test_parity import PROJECTIONS

BATCH, SEQUENCE = 64, 512
FAMILIES = {"llama-1b": "llama", "gpt2": "gpt2", "t5-large": "t5", "vit-h": "vit", "unet": ""}
"""Model → the family whose projections it has."""
MESHES: Mapping[str, Mapping[str, int]] = {
    "8": {"dp": 8},
    "8x8": {"dp": 8, "tp": 8},
    "4x4x4": {"dp": 4, "sp": 4, "tp": 4},
}
STRATEGIES = ("data", "zero3", "megatron", "megatron + sequence")
QUICK = {("llama-1b", "8"), ("llama-1b", "8x8"), ("vit-h", "8"), ("unet", "8")}


@functools.cache
def space_of(name: str, mesh: str) -> tuple[Any, Space]:
    """Two layers of a model for a mesh of H100s, with the model itself."""
    model, inputs = unet(BATCH, num_levels=2) if name == "unet" else built_in(name, BATCH, SEQUENCE, num_layers=2)
    program = capture(skeleton(model), inputs, {})
    return model, build_space(program, Mesh(MESHES[mesh], hardware="h100"), load("h100"))


def by_hand(name: str, mesh: str, strategy: str) -> dict[int, Any] | None:
    """The pins of a strategy; None where it has nothing to split in this model or on this mesh."""
    model, space = space_of(name, mesh)
    axes = list(MESHES[mesh])
    split = axes[-1] if len(axes) > 1 else axes[0]
    megatron = strategy.startswith("megatron")
    if (megatron and not FAMILIES[name]) or (strategy.endswith("sequence") and name == "vit-h"):
        return None  # no projections, and 257 positions that no axis divides
    for module in model.modules():
        module.__dict__.pop("_autopar_annotations", None)
    data = [axis for axis in axes if not megatron or axis not in (split, "sp")]
    if data:
        roles: dict[str, Any] = dict.fromkeys(data, "data")
        annotate(model, "*", **roles)
    if strategy == "zero3":
        annotate(model, "*", storage=axes[0], regather=True)
    if megatron:
        columns, rows = PROJECTIONS[FAMILIES[name]]
        for role, patterns in (("column", columns), ("row", rows)):
            for pattern in patterns:
                specified: dict[str, Any] = {split: role}
                annotate(model, pattern, **specified)
    if strategy.endswith("sequence"):
        norms: dict[str, Any] = {split: "sequence"}
        annotate(model, "*norm*" if name != "gpt2" else "*ln_*", **norms)
    return pins_of(annotations_of(model), space, "auto", {})


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:annotate")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.slow)
        for name in FAMILIES
        for mesh in MESHES
    ],
)
def test_no_strategy_by_hand_is_faster_than_the_plan(name: str, mesh: str, strategy: str) -> None:
    pins = by_hand(name, mesh, strategy)
    if pins is None:
        pytest.skip(f"{name} has nothing to split so")
    _, space = space_of(name, mesh)
    hand, _ = make_plan(space, pins)
    free = _free(name, mesh)
    assert free.bound <= hand.seconds * (1 + 1e-9)
    assert free.seconds <= hand.seconds * (1 + 1e-9) or free.gap > 0
    assert hand.bound >= free.bound * (1 - 1e-9) or hand.gap > 0


@functools.cache
def _free(name: str, mesh: str) -> Any:
    return make_plan(space_of(name, mesh)[1], {})[0]
