"""PyTorch's own databases of operators and modules as cases: each alone in a small model, split five ways.

Their samples are of size 5, 10 and 20, so the mesh has an axis of 5. What a sample calls its input is multiplied by a
parameter, other floats are parameters, and the rest (masks, indices) arrives with the batch.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.space.space import Space
from tests.support.simulation.outcome import Outcome, judged
from tests.support.simulation.training import Pins, Steps, train_alone, train_on_ranks


def _databases() -> tuple[list[Any], list[Any]]:
    """`op_db` and `module_db`; what they import wants expecttest for a TestCase that they do not use."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # pyright: ignore[reportAttributeAccessIssue]
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = stub  # some samples import it again when they are made
    methods = importlib.import_module("torch.testing._internal.common_methods_invocations")
    modules = importlib.import_module("torch.testing._internal.common_modules")
    return methods.op_db, modules.module_db


OPERATORS, MODULES = _databases()
MESH = {"dp": 5}
DTYPE = torch.float64
SAMPLES, LOOKED_AT, MAX_ELEMENTS = 2, 12, 2000
"""How many samples of each operator and module are run, out of how many, and how large their inputs may be."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A model around one call: `build` makes it anew, with the same values each time."""

    build: Callable[[], nn.Module]
    batch: Mapping[str, Tensor]


class Alone(nn.Module):
    """One call on tensors, and a loss of all that comes out of it."""

    def __init__(self, call: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.call, self.spec, self.leaves = call, spec, list(leaves)
        self.scale = nn.Parameter(torch.ones((), dtype=DTYPE))
        for number, leaf in enumerate(leaves):
            if number and _is_float(leaf):
                self.leaves[number] = None
                self.register_parameter(f"p{number}", nn.Parameter(leaf.detach().clone()))

    def forward(self, **batch: Tensor) -> Tensor:
        leaves = list(self.leaves)
        for number in range(len(leaves)):
            if f"x{number}" in batch:
                x = batch[f"x{number}"]
                leaves[number] = x * self.scale if _is_float(x) else x
            elif f"p{number}" in self._parameters:
                leaves[number] = self._parameters[f"p{number}"]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return loss_of(self.call(*args, **kwargs))


class Wrapped(nn.Module):
    """A module on its inputs, and a loss of all that comes out of it."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.module, self.leaves, self.spec = module, leaves, spec

    def forward(self, **batch: Tensor) -> Tensor:
        leaves = [batch.get(f"x{number}", leaf) for number, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return loss_of(self.module(*args, **kwargs))


def loss_of(outputs: Any) -> Tensor:
    """The sum of the means of all tensors of numbers among outputs."""
    floats = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.dtype != torch.bool and x.numel()]
    if not floats:
        raise ValueError("no numbers come out")
    real = [torch.view_as_real(x) if x.is_complex() else x for x in floats]
    return sum((x.double().sin().mean() for x in real), torch.zeros((), dtype=DTYPE))


def operators() -> dict[str, Any]:
    """Every operator of the database that knows our dtype, by name and variant."""
    known = [op for op in OPERATORS if DTYPE in op.supported_dtypes("cpu")]
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in known}


def modules() -> dict[str, Any]:
    """Every module of the database, by name."""
    return {info.name: info for info in MODULES}


def samples_of_operator(op: Any) -> Iterator[Sample]:
    """The first samples of an operator that have an input with numbers."""
    torch.manual_seed(0)
    for sample in _first(
        op.sample_inputs("cpu", DTYPE, requires_grad=op.supports_autograd), lambda s: _num_elements(s.input)
    ):
        given = ((sample.input, *sample.args), dict(sample.kwargs))
        leaves, spec = pytree.tree_flatten(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given))
        given_whole = {0: leaves[0]} if isinstance(leaves[0], Tensor) else {}
        given_whole |= {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not _is_float(leaf)}
        batch = {f"x{number}": leaf for number, leaf in given_whole.items()}
        yield Sample(functools.partial(Alone, op.op, leaves, spec), batch)


def samples_of_module(info: Any) -> Iterator[Sample]:
    """The first samples of a module."""
    torch.manual_seed(0)
    found = info.module_inputs_func(info, device="cpu", dtype=DTYPE, requires_grad=True, training=True)
    for sample in _first((s for s in found if s.forward_input), lambda s: _num_elements(s.forward_input.args)):
        made, given = sample.constructor_input, (sample.forward_input.args, dict(sample.forward_input.kwargs))
        leaves, spec = pytree.tree_flatten(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given))

        def build(made: Any = made, leaves: list[Any] = leaves, spec: pytree.TreeSpec = spec) -> nn.Module:
            torch.manual_seed(0)
            return Wrapped(info.module_cls(*made.args, **made.kwargs).to(DTYPE), leaves, spec)

        yield Sample(build, {f"x{number}": leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})


def judge_sample(sample: Sample, chance: random.Random | None = None, seconds: float = 120.0) -> Outcome:
    """Train one step both ways; with `chance` every decision takes a strategy at random, one that splits if it can."""
    try:
        if _draws(sample):
            return Outcome("unusable", "draws random numbers")
    except Exception as error:
        return Outcome("unusable", f"{type(error).__name__}: {error}")
    steps = Steps([sample.batch])

    def forced(space: Space, pins: Pins) -> Pins:
        return {**_at_random(space, chance), **pins} if chance else pins

    return judged(
        lambda: train_alone(sample.build(), steps),
        lambda: train_on_ranks(sample.build(), steps, MESH, {}, forced),
        seconds,
    )


def _at_random(space: Space, chance: random.Random) -> Pins:
    pins = {}
    for number, decision in enumerate(space.decisions):
        strategies = decision.menu.strategies
        splitting = [i for i, s in enumerate(strategies) if any(p.is_split for layout in s.outputs for p in layout)]
        pins[number] = np.zeros(len(strategies), dtype=bool)
        pins[number][chance.choice(splitting or range(len(strategies)))] = True
    return pins


class _Drawing(TorchDispatchMode):
    """Notes whether random numbers are drawn; some samples set seeds themselves, and draw the same each time."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _draws(sample: Sample) -> bool:
    """Whether the call draws random numbers, which ranks and one process draw differently."""
    model = sample.build()
    with warnings.catch_warnings(), _Drawing() as drawing:
        warnings.simplefilter("ignore")
        model(**sample.batch)
    return drawing.found


def _first(samples: Iterable[Any], size: Callable[[Any], int]) -> list[Any]:
    """The largest of the first samples, of those that are small."""
    found = [sample for sample in itertools.islice(samples, LOOKED_AT) if 0 < size(sample) <= MAX_ELEMENTS]
    return sorted(found, key=size, reverse=True)[:SAMPLES]


def _num_elements(tree: Any) -> int:
    return sum(x.numel() for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
