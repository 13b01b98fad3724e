"""Memory in symbols: the model of the peak on other sizes, whatever is chosen."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from autopar.costs.hardware.load import load
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.expressions import evaluate
from autopar.costs.pricing.optimizer import Optimizer
from autopar.views.formulas.memory import SymbolicMemory, memory_formulas
from autopar.views.formulas.repetition import Repetition, stacks_of
from autopar.views.formulas.symbolic_shapes import symbolic_shapes
from autopar.views.formulas.symbolic_space import LocalSizes
from autopar.views.formulas.symbols import LAYERS
from tests.views.formulas.test_formulas import space_at


@pytest.mark.parametrize(("family", "optimizer"), [("llama", "adamw"), ("t5", "adamw"), ("llama", "adamw-8bit")])
def test_every_part_of_any_choice_has_the_value_of_the_peak(family: str, optimizer: str) -> None:
    space, rng = space_at(family, load("h100")).with_optimizer(Optimizer(optimizer)), random.Random(0)
    memory = MemoryModel(space, None, prefetch=1, offloads=True)
    stacks = stacks_of(space.program)
    shapes = symbolic_shapes(space, stacks)
    sizes, repetition = LocalSizes(space, shapes), Repetition(space, stacks)
    values = {**shapes.symbols, LAYERS: len(stacks[0].numbers), "dp": 2, "tp": 2}
    exact = {name: Fraction(value) for name, value in values.items()}
    possible = [np.flatnonzero(np.isfinite(each.candidates.seconds)).tolist() for each in space.decisions]
    for _ in range(3):
        choices = list(map(rng.choice, possible))
        modes = {segment: rng.choice(memory.lifetimes.modes) for segment in memory.lifetimes.segments}
        peak, use, _ = memory_use(memory, choices, modes)
        formulas = memory_formulas(SymbolicMemory(memory, choices, sizes), modes, repetition)
        found = {name.removeprefix("memory/"): evaluate(text, exact) for name, text in formulas.items()}
        assert found.pop("memory") == peak
        assert found == use.parts
