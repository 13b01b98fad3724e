"""A case: a program, the mesh that it is split over, and all options of `compile`; drawn from one integer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.strategies.presets import PRESETS
from tests.fuzz.draw import draw_program, trains
from tests.fuzz.program import Program

AXES = ("dp", "tp", "depth")
MESHES: Mapping[tuple[int, ...], float] = {
    (2,): 5,
    (4,): 1.5,
    (2, 2): 5,
    (2, 4): 0.5,
    (4, 2): 0.5,
    (2, 2, 2): 1,
    (1, 2): 0.5,
    (2, 1): 0.5,
    (1,): 0.1,
    (3,): 0.5,
    (2, 1, 2): 0.3,
}
"""Mesh → its relative frequency."""
ROLES = ("data", "column", "row", "sequence", "expert", "replicated", 0, 1, -1, None)
OPERATIONS = (
    "linear",
    "add",
    "mul",
    "sum",
    "mean",
    "softmax",
    "cat",
    "embedding",
    "view",
    "matmul",
    "conv2d",
    "layer_norm",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One program on one mesh, and how it is trained there."""

    program: Program
    mesh: tuple[int, ...]
    annotations: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(pattern, keywords) of `autopar.annotate`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `autopar.compile`."""
    forced: float = 0.0
    """The share of all decisions that are forced to a strategy at random, as its name and `seed` say."""
    seed: int = 0
    steps: int = 2
    optimizer: str = "sgd"
    evaluated: bool = False
    """True if the last batch is run again in evaluation mode."""

    @property
    def axes(self) -> tuple[str, ...]:
        return AXES[: len(self.mesh)]

    @property
    def num_ranks(self) -> int:
        total = 1
        for size in self.mesh:
            total *= size
        return total

    @property
    def num_microbatches(self) -> int:
        return self.options.get("microbatches", 1)


def draw_case(seed: int, max_lines: int = 10) -> Case:
    """The case of a seed: the same one whenever and wherever it is drawn."""
    chance = random.Random(seed)
    program = draw_program(chance, max_lines)
    (mesh,) = chance.choices(list(MESHES), list(MESHES.values()))
    options: dict[str, Any] = {}
    annotations: list[tuple[str, dict[str, Any]]] = []
    how = chance.random()
    if how < 0.2:
        of_training = [name for name in PRESETS if name != "flash_decoding"]
        options["strategy"] = chance.choice([*of_training, "data_parallel", "zero1", "zero2", "zero3", "megatron"])
    elif how < 0.5:
        options["mode"] = chance.choice(["auto", "auto", "auto", "semi_auto", "manual"])
        annotations = [_annotation(chance, program, mesh) for _ in range(chance.choice((1, 1, 2)))]
    if chance.random() < 0.15:
        options["recompute"] = chance.choice(["full", "selective"])
    if chance.random() < 0.1 and trains(program, 2):
        options["microbatches"] = 2
    if chance.random() < 0.07:
        options["memory"] = int(10 ** chance.uniform(3.3, 5))
    if chance.random() < 0.1:
        options["outputs"] = "full"
    if chance.random() < 0.05 and len(mesh) == 1:
        options["solver"] = "ilp"  # the reference, which is slow where there are many axes
    if any("dropout" in line for block in program.blocks for line in block):
        options["recompute"] = "none"  # simulated ranks cannot put generators back to where they were
    forced = chance.choice([0.0, 0.0, 0.2, 0.5, 1.0])
    optimizer, steps = chance.choice(["sgd", "sgd", "adamw"]), chance.choice([2, 2, 2, 3])
    return Case(program, mesh, tuple(annotations), options, forced, seed, steps, optimizer, chance.random() < 0.05)


def _annotation(chance: random.Random, program: Program, mesh: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """Something that a user might say, whether or not it fits."""
    axes = AXES[: len(mesh)]
    pattern = chance.choice(
        ["*", "*", "layers.0", "layers.0*", chance.choice(OPERATIONS), *map("*.{}".format, program.parameters)]
    )
    if chance.random() < 0.3:
        specified: dict[str, Any] = {"storage": tuple(chance.sample(axes, chance.randint(1, len(axes))))}
        return pattern, specified | ({"regather": chance.random() < 0.5} if chance.random() < 0.4 else {})
    return pattern, {axis: chance.choice(ROLES) for axis in chance.sample(axes, chance.randint(1, len(axes)))}
