"""PyTorch's own databases of operators and modules as cases: each alone in a small model, split five ways.

Their samples are of size 5, 10 and 20, so the mesh has an axis of 5. What a sample calls its input is multiplied by a
parameter, other floats are parameters, and the rest (masks, indices) arrives with the batch.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

from autopar.space.space import Space
from tests.support.simulation.outcome import Outcome, judged
from tests.support.simulation.training import Pins, Steps, train_alone, train_on_ranks

MESH = {"dp": 5}
DTYPE = torch.float64
SAMPLES = 2
"""How many samples of each operator and module are run."""


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
    known = [op for op in op_db if DTYPE in op.supported_dtypes("cpu")]
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in known}


def modules() -> dict[str, Any]:
    """Every module of the database, by name."""
    return {info.name: info for info in module_db}


def samples_of_operator(op: Any) -> Iterator[Sample]:
    """The first samples of an operator that have an input with numbers."""
    torch.manual_seed(0)
    for sample in _first(op.sample_inputs("cpu", DTYPE, requires_grad=op.supports_autograd)):
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
    for sample in _first(item for item in found if item.forward_input is not None):
        made, given = sample.constructor_input, (sample.forward_input.args, dict(sample.forward_input.kwargs))
        leaves, spec = pytree.tree_flatten(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given))

        def build(made: Any = made, leaves: list[Any] = leaves, spec: pytree.TreeSpec = spec) -> nn.Module:
            torch.manual_seed(0)
            return Wrapped(info.module_cls(*made.args, **made.kwargs).to(DTYPE), leaves, spec)

        yield Sample(build, {f"x{number}": leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})


def judge_sample(sample: Sample, forced: bool, seconds: float = 120.0) -> Outcome:
    """Train one step both ways; with `forced` every decision takes a strategy at random."""
    try:
        if _draws(sample):
            return Outcome("unusable", "draws random numbers")
    except Exception as error:
        return Outcome("unusable", f"{type(error).__name__}: {error}")
    steps = Steps([sample.batch])
    return judged(
        lambda: train_alone(sample.build(), steps),
        lambda: train_on_ranks(sample.build(), steps, MESH, {}, _at_random if forced else lambda space, pins: pins),
        seconds,
    )


def _at_random(space: Space, pins: Pins) -> Pins:
    forced = dict(pins)
    for number, decision in enumerate(space.decisions):
        count = len(decision.menu.strategies)
        if number not in pins:
            forced[number] = np.zeros(count, dtype=bool)
            forced[number][random.Random(decision.name).randrange(count)] = True
    return forced


def _draws(sample: Sample) -> bool:
    """Whether the call depends on the generator's seed."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (1, 2):
            model = sample.build()
            torch.manual_seed(seed)
            found.append(model(**sample.batch).detach())
    return not torch.equal(*found) and bool(found[0].isfinite())


def _first(samples: Any) -> list[Any]:
    return [sample for sample, _ in zip(samples, range(SAMPLES), strict=False)]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
