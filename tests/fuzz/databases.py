"""PyTorch's own databases of operators and modules as cases: each alone in a small model, split five ways.

Their samples are of size 5, 10 and 20, so the mesh has an axis of 5. What a sample calls its input is multiplied by a
parameter, other floats are parameters, and the rest (masks, indices) arrives with the batch. Where one process cannot
train that, less of it learns: the input alone, or nothing but a parameter outside the call. What draws random numbers,
and what is not finite, is left out: it cannot be compared with one process.
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
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.costs.space.space import Space
from autopar.ir.program.effects import draws
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
OTHER_DTYPES = (torch.int64, torch.complex128, torch.float32, torch.float8_e4m3fn)
"""Dtypes for operators that do not support DTYPE; the first one that they support is used."""
SAMPLES, LOOKED_AT, MAX_ELEMENTS = 2, 12, 2000
"""Samples to run per operator and module, samples to consider, and input size (in elements) to prefer.

Samples closest to MAX_ELEMENTS from below come first; larger ones come last.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """A model around one call: `build` makes it anew, with the same values each time."""

    build: Callable[[], nn.Module]
    batch: Mapping[str, Tensor]


class Alone(nn.Module):
    """One call on tensors, and a loss of all that comes out of it."""

    def __init__(self, call: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec, learns: str) -> None:
        super().__init__()
        self.call, self.spec, self.leaves, self.learns = call, spec, list(leaves), learns
        self.scale = nn.Parameter(torch.ones((), dtype=DTYPE))
        for number, leaf in enumerate(leaves):
            if number and _is_float(leaf):
                self.leaves[number], value = None, leaf.detach().clone()
                if learns == "everything":
                    self.register_parameter(f"p{number}", nn.Parameter(value))
                else:
                    self.register_buffer(f"p{number}", value)

    def forward(self, **batch: Tensor) -> Tensor:
        leaves = list(self.leaves)
        for number in range(len(leaves)):
            if f"x{number}" in batch:
                x = batch[f"x{number}"]
                leaves[number] = x * self.scale if _is_float(x) and self.learns != "nothing" else x
            elif hasattr(self, f"p{number}"):
                leaves[number] = getattr(self, f"p{number}")
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return loss_of(self.call(*args, **kwargs)) + self.scale


class Wrapped(nn.Module):
    """A module on its inputs, and a loss of all that comes out of it."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, learns: str) -> None:
        super().__init__()
        self.module, self.leaves, self.spec, self.learns = module, leaves, spec, learns
        self.scale = nn.Parameter(torch.ones((), dtype=DTYPE))

    def forward(self, **batch: Tensor) -> Tensor:
        leaves = [batch.get(f"x{number}", leaf) for number, leaf in enumerate(self.leaves)]
        if _is_float(leaves[0]) and self.learns != "nothing":
            leaves[0] = leaves[0] * self.scale
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return loss_of(self.module(*args, **kwargs)) + self.scale


def loss_of(outputs: Any) -> Tensor:
    """The sum of the means of all tensors among outputs."""
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.numel()]
    if not tensors:
        raise ValueError("no tensors come out")
    real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
    return sum((x.double().sin().mean() for x in real), torch.zeros((), dtype=DTYPE))


def operators() -> dict[str, Any]:
    """Every operator of the database that runs on the CPU, by name and variant."""
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in OPERATORS if _dtype_of(op)}


def _dtype_of(op: Any) -> torch.dtype | None:
    return next((dtype for dtype in (DTYPE, *OTHER_DTYPES) if dtype in op.supported_dtypes("cpu")), None)


def modules() -> dict[str, Any]:
    """Every module of the database, by name."""
    return {info.name: info for info in MODULES}


def samples_of_operator(op: Any) -> Iterator[Sample]:
    """The largest samples of an operator that one process trains."""
    torch.manual_seed(0)
    dtype = _dtype_of(op)
    found = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype is DTYPE)
    return _usable(_sample_of_operator(op, sample) for sample in _by_size(found, lambda s: s.input))


def _sample_of_operator(op: Any, sample: Any) -> Callable[[str], Sample]:
    given = ((sample.input, *sample.args), dict(sample.kwargs))
    leaves, spec = pytree.tree_flatten(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given))
    given_whole = {n: leaf for n, leaf in enumerate(leaves[:1]) if isinstance(leaf, Tensor)}
    given_whole |= {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not _is_float(leaf)}
    batch = {f"x{number}": leaf for number, leaf in given_whole.items()}
    return lambda learns: Sample(functools.partial(Alone, op.op, leaves, spec, learns), batch)


def samples_of_module(info: Any) -> Iterator[Sample]:
    """The largest samples of a module that one process trains; its dropout is off."""
    torch.manual_seed(0)
    found = info.module_inputs_func(info, device="cpu", dtype=DTYPE, requires_grad=True, training=True)
    with_inputs = (sample for sample in found if sample.forward_input)
    return _usable(_sample_of_module(info, sample) for sample in _by_size(with_inputs, lambda s: s.forward_input.args))


def _sample_of_module(info: Any, sample: Any) -> Callable[[str], Sample]:
    made, given = sample.constructor_input, (sample.forward_input.args, dict(sample.forward_input.kwargs))
    leaves, spec = pytree.tree_flatten(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given))
    batch = {f"x{number}": leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def build(learns: str) -> nn.Module:
        torch.manual_seed(0)
        module = info.module_cls(*made.args, **made.kwargs).to(DTYPE)
        for part in module.modules():
            for name in ("p",) if isinstance(part, nn.modules.dropout._DropoutNd) else ("dropout",):
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
        return Wrapped(module, leaves, spec, learns)

    return lambda learns: Sample(functools.partial(build, learns), batch)


class UnusableError(Exception):
    """One process cannot train any sample; the message says why not."""


def _usable(samples: Iterable[Callable[[str], Sample]]) -> Iterator[Sample]:
    """The first samples that one process trains, with as much learning as it can; UnusableError where there is none."""
    count, fault = 0, "all samples are empty"
    for made in samples:
        for sample in map(made, ("everything", "input", "nothing")):
            fault = _fault_alone(sample)
            if not fault:
                count += 1
                yield sample
                break
        if count == SAMPLES:
            return
    if not count:
        raise UnusableError(fault)


def _fault_alone(sample: Sample) -> str:
    """Why ranks cannot be compared with one process; "" where they can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if _draws(sample):
                return "draws random numbers"
            return "" if train_alone(sample.build(), Steps([sample.batch])).is_finite else "inf, nan or huge numbers"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def judge_sample(sample: Sample, chance: random.Random | None = None, seconds: float = 120.0) -> Outcome:
    """Train one step both ways; with `chance` every decision takes a strategy at random, one that splits if it can."""
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
        strategies = decision.candidates.strategies
        splitting = [i for i, s in enumerate(strategies) if any(p.is_split for layout in s.outputs for p in layout)]
        pins[number] = np.zeros(len(strategies), dtype=bool)
        pins[number][chance.choice(splitting or range(len(strategies)))] = True
    return pins


class _Drawing(TorchDispatchMode):
    """Notes whether random numbers are drawn; some samples set seeds themselves, and draw the same each time."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema.arguments, kwargs or {}
        given = {argument.name: argument.default_value for argument in schema}
        given |= {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        self.found |= draws(func, given)
        return func(*args, **kwargs)


def _draws(sample: Sample) -> bool:
    """Return whether the call draws random numbers, which ranks and one process draw differently."""
    model = sample.build()
    with _Drawing() as drawing:
        model(**sample.batch)
    return drawing.found


def _by_size(samples: Iterable[Any], inputs: Callable[[Any], Any]) -> list[Any]:
    """The first samples that are not empty: those that are small, the largest first, then the others."""

    def badness(sample: Any) -> tuple[bool, int]:
        size = _num_elements(inputs(sample))
        return size > MAX_ELEMENTS, abs(MAX_ELEMENTS - size)

    def is_empty(sample: Any) -> bool:
        tensors = [x for x in pytree.tree_leaves(inputs(sample)) if isinstance(x, Tensor)]
        return bool(tensors) and not _num_elements(tensors)

    return sorted(itertools.islice(itertools.filterfalse(is_empty, samples), LOOKED_AT), key=badness)


def _num_elements(tree: Any) -> int:
    return sum(x.numel() for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))


def _is_float(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point()
